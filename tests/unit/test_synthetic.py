"""Synthetic values have the spread that real models have, whatever the chunks."""

import numpy as np
import pytest

from parity import distributions, synthetic


def drawn(canonical, shape, dtype="F32", generation="transformers", seed=0):
    tensor = synthetic.Tensor(canonical, canonical, dtype, shape)
    return np.concatenate(list(synthetic.values(tensor, generation, seed)))


LAYER = "language_model.model.layers.0."


def test_decays_cover_many_time_scales():
    rate = np.exp(drawn(LAYER + "linear_attn.A_log", (4000,)))
    assert 0.5 <= rate.min() < 0.6
    assert 7.9 < rate.max() <= 8.001
    step = np.log1p(np.exp(drawn(LAYER + "linear_attn.dt_bias", (4000,))))
    assert step.min() < 0.0015
    assert step.max() > 0.08


@pytest.mark.parametrize(
    ("name", "shape", "mean", "std"),
    [
        ("mlp.up_proj.weight", (500, 100), 0, 0.1),
        ("linear_attn.conv1d.weight", (9000, 4, 1), 0, 0.5),
        ("linear_attn.norm.weight", (30000,), 1, 0.1),
        ("input_layernorm.weight", (30000,), 0, 0.2),
        ("self_attn.q_proj.bias", (30000,), 0, 0.3),
    ],
)
def test_each_kind_has_its_spread(name, shape, mean, std):
    value = drawn(LAYER + name, shape)
    assert abs(value.mean() - mean) < 0.02
    assert abs(value.std() / std - 1) < 0.02


def test_gains_are_stored_less_one_in_exports_alone():
    name, shape = "language_model.model.norm.weight", (64,)
    export, converted = (drawn(name, shape, "F32", g) for g in ("transformers", "mlx-lm"))
    assert np.array_equal(converted, export + np.float32(1))
    gated = LAYER + "linear_attn.norm.weight"
    assert np.array_equal(drawn(gated, shape), drawn(gated, shape, "F32", "mlx-lm"))


def test_chunks_and_the_dtype_do_not_change_what_is_drawn(monkeypatch):
    whole = drawn(LAYER + "mlp.up_proj.weight", (50, 30))
    monkeypatch.setattr(synthetic, "_CHUNK", 77)
    assert np.array_equal(drawn(LAYER + "mlp.up_proj.weight", (50, 30)), whole)
    half = drawn(LAYER + "mlp.up_proj.weight", (50, 30), "F16")
    assert np.array_equal(half, whole.astype(np.float16))


def test_a_name_that_is_no_parameters_is_refused():
    with pytest.raises(ValueError, match="is no parameter whose spread is known"):
        distributions.normal(LAYER + "mlp.bias", (4,))


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_shards_are_as_many_as_asked_for_and_none_is_empty(count):
    sizes = (1, 900, 1, 1, 1, 1)
    made = [synthetic.Tensor(str(i), str(i), "U8", (n,)) for i, n in enumerate(sizes)]
    shards = synthetic.in_shards(made, count)
    assert len(shards) == count
    assert all(shards)
    assert [tensor for shard in shards for tensor in shard] == made
