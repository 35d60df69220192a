"""Bit patterns and error measures of float tensors, dtype by dtype.

−0 and +0 are different bits at 0 ulp from each other; a NaN is equal only to the same NaN.
"""

import ml_dtypes
import numpy as np

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
_BFLOAT16_EXPONENT = np.uint16(0x7F80)
_BLOCK = 1 << 17
"""Elements looked at together: both operands and the masks stay in the second-level cache."""


def by_name(name: str) -> np.dtype:
    """Return the NumPy dtype of this name; `bfloat16` is ml_dtypes'."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def words(value: np.ndarray) -> np.ndarray:
    """Return the bit patterns as flat unsigned integers (a view where the layout allows)."""
    return np.ascontiguousarray(value).reshape(-1).view(_WORDS[value.dtype.itemsize])


def is_float(dtype: np.dtype) -> bool:
    """Return whether this is one of the float dtypes known here."""
    return dtype in _FLOATS


def same_bits_and_finite(a: np.ndarray, b: np.ndarray) -> tuple[bool, bool]:
    """Return (all bits equal, no infinity or NaN in either) for equal dtypes and shapes."""
    left, right = words(a), words(b)
    for start in range(0, left.size, _BLOCK):
        x, y = left[start : start + _BLOCK], right[start : start + _BLOCK]
        if not np.array_equal(x, y):
            return False, all_finite(a) and all_finite(b)
        if not _finite(x, a.dtype):
            return np.array_equal(left[start:], right[start:]), False
    return True, True


def all_finite(value: np.ndarray) -> bool:
    """Return whether no element is an infinity or a NaN."""
    return _finite(words(value), value.dtype)


def _finite(bits: np.ndarray, dtype: np.dtype) -> bool:
    if bits.size == 0 or not is_float(dtype):
        return True
    if dtype == ml_dtypes.bfloat16:  # its own isfinite goes element by element
        return bool((bits & _BFLOAT16_EXPONENT).max() != _BFLOAT16_EXPONENT)
    return bool(np.isfinite(bits.view(dtype)).all())


def ordered(value: np.ndarray) -> np.ndarray:
    """Map floats to int64 so that neighbours differ by 1 and both zeros are 0."""
    bits = words(value)
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    magnitude = (bits & ~sign).astype(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


def ulp_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many floats of their common dtype lie between each pair, flat, as int64."""
    return np.abs(ordered(a) - ordered(b))


def relative_rms(value: np.ndarray, truth: np.ndarray) -> float:
    """Return |value − truth| / |truth| in the 2-norm; 0 for 0/0 and infinity for x/0."""
    return float(vector_errors(value.reshape(1, -1), truth.reshape(1, -1))[0])


def vector_errors(value: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the relative RMS of each vector along the last axis, flat."""
    exact = truth.astype(np.float64)
    error = np.linalg.norm(value.astype(np.float64) - exact, axis=-1).ravel()
    scale = np.linalg.norm(exact, axis=-1).ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0.0, 0.0, error / scale)
