"""What the gains' values say, read from a few hundred bytes of each."""

import ml_dtypes
import numpy as np
import pytest

from parity import safetensors_file
from parity.evidence import SAMPLE, Gain, judge, read_evidence
from qwen35.headers import read_header

PREFIX = "language_model.model.layers."
RNG = np.random.default_rng(0)


def gains(center, layers=8, spread=0.1, dtype=np.float32, control=1.0):
    arrays = {}
    for i in range(layers):
        for kind in ("input_layernorm", "post_attention_layernorm"):
            value = RNG.normal(center, spread, 300).astype(dtype)
            arrays[f"{PREFIX}{i}.{kind}.weight"] = value
        arrays[f"{PREFIX}{i}.linear_attn.norm.weight"] = np.full(8, control, dtype)
    return arrays


def evidence(tmp_path, arrays):
    file = tmp_path / "model.safetensors"
    safetensors_file.write(file, arrays)
    headers = read_header(file)
    return read_evidence(headers, {name: name for name in headers})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(("center", "says"), [(0, "γ−1"), (1, "γ"), (2, "γ+1"), (0.48, "unclear")])
def test_the_mean_says_the_convention_in_every_dtype(tmp_path, dtype, center, says):
    found = evidence(tmp_path, gains(center, dtype=dtype))
    assert found.says == says
    assert abs(found.mean_gain - center) < 0.02


def test_means_are_those_of_the_values(tmp_path):
    arrays = gains(0.97, layers=1, dtype=ml_dtypes.bfloat16)
    found = evidence(tmp_path, arrays)
    for gain in found.gains:
        due = np.mean(arrays[gain.name][:SAMPLE].astype(np.float64))
        assert gain.mean == pytest.approx(due)


def test_few_values_are_read(tmp_path):
    found = evidence(tmp_path, gains(1, layers=4))
    assert found.values == 4 * (2 * SAMPLE + 8)
    assert found.to_json()["kinds"]["control"] == {
        "tensors": 4, "mean": 1.0, "lowest": 1.0, "highest": 1.0
    }  # fmt: skip


def test_the_control_and_the_wide_kinds_do_not_decide(tmp_path):
    odd = {
        f"{PREFIX}3.self_attn.k_norm.weight": np.full(8, 2.3, np.float32),
        "language_model.model.norm.weight": np.full(8, 3.0, np.float32),
    }
    assert evidence(tmp_path, gains(1) | odd).says == "γ"
    assert evidence(tmp_path, odd).says == "unclear"


def test_one_odd_layer_norm_is_no_mixture_but_a_layer_is(tmp_path):
    other = gains(0)
    one = gains(1) | {k: v for k, v in other.items() if k.startswith(f"{PREFIX}2.input")}
    assert evidence(tmp_path, one).says == "γ"
    layer = gains(1) | {k: v for k, v in other.items() if k.startswith(f"{PREFIX}2.")}
    found = evidence(tmp_path, layer)
    assert found.says == "mixed"
    assert "2 of 16 layer norms say γ−1, the others γ: " in found.because


def test_a_fresh_model_is_all_zero_and_says_so_by_its_control(tmp_path):
    assert evidence(tmp_path, gains(0, spread=0)).says == "γ−1"


def test_a_sparse_file_says_nothing(tmp_path):
    found = evidence(tmp_path, gains(0, spread=0, control=0))
    assert found.says == "unclear"
    assert "headers alone" in found.because


def test_gains_that_are_no_floats_or_not_finite_are_left_out(tmp_path):
    arrays = {f"{PREFIX}0.input_layernorm.weight": np.ones(4, np.int32)}
    assert evidence(tmp_path, arrays).says == "unclear"
    arrays = {f"{PREFIX}0.input_layernorm.weight": np.full(4, np.nan, np.float32)}
    assert evidence(tmp_path, arrays).says == "unclear"


def test_positive_values_near_zero_are_not_called_centred():
    gain = Gain("a.input_layernorm.weight", "input_layernorm", 0.2, 0.0, False)
    assert judge([gain]).says == "unclear"
