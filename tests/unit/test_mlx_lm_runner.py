"""The adapter sees every tap and changes nothing."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, qwen3_5, qwen3_next
from mlx_lm.utils import load_model

from parity import suite, taps
from parity.runners.mlx_arrays import to_numpy
from parity.runners.mlx_lm import MlxLmRunner
from qwen35.headers import open_checkpoint

PLAN = suite.CHECKPOINTS["tiny"]
PROGRAM = suite.program(PLAN, "chunk-3", 0)


@pytest.fixture(scope="module")
def path(checkpoints):
    return checkpoints.path("tiny", "bfloat16", "mlx-lm")


@pytest.fixture(scope="module")
def runner(path):
    return MlxLmRunner(open_checkpoint(path), "bfloat16")


def test_every_tap_of_every_forward_is_recorded_and_nothing_else(runner):
    trace = runner.run(PROGRAM)
    forwards = range(len(PROGRAM.forwards()))
    due = {(f, name) for f in forwards for name in taps.order(runner.layer_types)}
    assert set(trace.tensors) == due


def test_shapes_are_the_documented_ones(runner):
    c = PLAN.text_config
    sizes = {
        "B": 2,
        "S": 3,
        "T": 3,
        "H": c["hidden_size"],
        "I": c["intermediate_size"],
        "V": c["vocab_size"],
        "n": c["linear_conv_kernel_dim"] - 1,
        "Hk": c["linear_num_key_heads"],
        "Dk": c["linear_key_head_dim"],
        "Hv": c["linear_num_value_heads"],
        "Dv": c["linear_value_head_dim"],
        "Hq": c["num_attention_heads"],
        "Hkv": c["num_key_value_heads"],
        "D": c["head_dim"],
    }
    sizes["C"] = 2 * sizes["Hk"] * sizes["Dk"] + sizes["Hv"] * sizes["Dv"]
    sizes["Hq*D"] = sizes["Hq"] * sizes["D"]
    trace = runner.run(PROGRAM)
    for name, (_, tap) in taps.order(runner.layer_types).items():
        value = trace.tensors[0, name]
        assert value.shape == tuple(sizes[letter] for letter in tap.shape.split()), name
        assert value.dtype.name == ("bfloat16" if tap.dtype == "working" else tap.dtype), name


def test_observing_does_not_change_a_bit_of_the_logits(runner, path):
    model, _ = load_model(path)
    cache = model.make_cache()
    trace = runner.run(PROGRAM)
    for forward, (_, _, ids) in enumerate(PROGRAM.forwards()):
        logits = model(mx.array(ids), cache=cache)
        mx.eval(logits)
        assert to_numpy(logits).tobytes() == trace.tensors[forward, "logits"].tobytes()


def test_mlx_lm_is_as_before_after_a_run_and_after_one_that_fails(runner):
    def functions():
        return (
            qwen3_5.nn,
            qwen3_5.gated_delta_update,
            gated_delta.gated_delta_ops,
            gated_delta.gated_delta_kernel,
            qwen3_next.scaled_dot_product_attention,
        )

    before = functions()
    runner.run(PROGRAM)
    assert functions() == before

    def broken(forward, layer):
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        runner.run(PROGRAM, broken)
    assert functions() == before


def test_being_fed_its_own_stream_changes_nothing(runner):
    from parity.trace import feed_from

    free = runner.run(PROGRAM)
    fed = runner.run(PROGRAM, feed_from(free))
    assert all(np.array_equal(fed.tensors[k], v) for k, v in free.tensors.items())
