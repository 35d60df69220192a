"""Bit patterns and error measures of float tensors, dtype by dtype.

−0 and +0 are different bits at 0 ulp from each other; a NaN is equal only to the same NaN.
"""

import ml_dtypes
import numpy as np

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_EXPONENT = {
    np.dtype(np.float16): 0x7C00,
    np.dtype(ml_dtypes.bfloat16): 0x7F80,
    np.dtype(np.float32): 0x7F800000,
    np.dtype(np.float64): 0x7FF0000000000000,
}
_BLOCK = 1 << 16
"""Elements looked at together: both operands and the masks stay in the second-level cache."""


def words(value: np.ndarray) -> np.ndarray:
    """Return the bit patterns as flat unsigned integers (a view where the layout allows)."""
    return np.ascontiguousarray(value).reshape(-1).view(_WORDS[value.dtype.itemsize])


def is_float(dtype: np.dtype) -> bool:
    """Return whether this is one of the float dtypes known here."""
    return dtype in _EXPONENT


def same_bits_and_finite(a: np.ndarray, b: np.ndarray) -> tuple[bool, bool]:
    """Return (all bits equal, no infinity or NaN in either) for equal dtypes and shapes."""
    left, right = words(a), words(b)
    exponent = _EXPONENT.get(a.dtype)
    mask = None if exponent is None else left.dtype.type(exponent)
    for start in range(0, left.size, _BLOCK):
        x, y = left[start : start + _BLOCK], right[start : start + _BLOCK]
        if not np.array_equal(x, y):
            return False, all_finite(a) and all_finite(b)
        if mask is not None and ((x & mask) == mask).any():
            return np.array_equal(left[start:], right[start:]), False
    return True, True


def all_finite(value: np.ndarray) -> bool:
    """Return whether no element is an infinity or a NaN."""
    exponent = _EXPONENT.get(value.dtype)
    if exponent is None:
        return True
    bits = words(value)
    mask = bits.dtype.type(exponent)
    return not ((bits & mask) == mask).any()


def ordered(value: np.ndarray) -> np.ndarray:
    """Map floats to int64 so that neighbours differ by 1 and both zeros are 0."""
    bits = words(value)
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    magnitude = (bits & ~sign).astype(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


def ulp_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many floats of their common dtype lie between each pair, flat, as int64."""
    return np.abs(ordered(a) - ordered(b))


def square_sums(value: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Return (sum of squared errors, sum of truth's squares) in float64."""
    exact = truth.astype(np.float64)
    error = value.astype(np.float64) - exact
    return float(np.vdot(error, error)), float(np.vdot(exact, exact))


def relative_rms(value: np.ndarray, truth: np.ndarray) -> float:
    """Return |value − truth| / |truth| in the 2-norm; 0 for 0/0 and infinity for x/0."""
    return ratio(*square_sums(value, truth))


def ratio(error: float, scale: float) -> float:
    """Return sqrt(error/scale) with 0/0 = 0 and x/0 = infinity."""
    if error == 0.0:
        return 0.0
    return float(np.sqrt(error / scale)) if scale > 0.0 else float("inf")
