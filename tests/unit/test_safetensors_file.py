"""Tensor files keep every bit, and are what the safetensors library reads."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from parity import safetensors_file
from qwen35.errors import CheckpointError

VALUES = {
    "f32": np.array([[1.5, -0.0, np.nan], [np.inf, 1e-45, 3]], np.float32),
    "bf16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "f16": np.arange(4, dtype=np.float16)[::-2],
    "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_every_bit_shape_and_dtype_comes_back(tmp_path):
    safetensors_file.write(tmp_path / "x", VALUES)
    found = safetensors_file.read(tmp_path / "x")
    assert list(found) == list(VALUES)
    for name, value in VALUES.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes()


def test_the_library_reads_the_same(tmp_path):
    safetensors_file.write(tmp_path / "x", VALUES)
    with safe_open(tmp_path / "x", "np") as file:
        assert set(file.keys()) == set(VALUES)
        assert file.get_tensor("f32").tobytes() == VALUES["f32"].tobytes()
        assert np.array_equal(file.get_tensor("turned"), VALUES["turned"])


def test_a_damaged_file_and_an_unread_dtype_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="has 7 bytes, 8 are due"):
        safetensors_file.read(tmp_path / "x")
    (tmp_path / "y").write_bytes(safetensors_file.header([("a", "F8_E4M3", (1,))]) + b"x")
    with pytest.raises(ValueError, match="tensor 'a' is F8_E4M3, which is not read"):
        safetensors_file.read(tmp_path / "y")
