import ml_dtypes
import numpy as np
import pytest

from parity import bits

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_zeros_are_different_bits_at_no_distance(dtype):
    plus, minus = np.array([0.0], dtype), np.array([-0.0], dtype)
    assert bits.same_bits_and_finite(plus, minus) == (False, True)
    assert bits.ulp_distances(plus, minus).tolist() == [0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_equal_bits_that_are_not_finite_are_reported_as_such(dtype, value):
    array = np.array([1.0, value], dtype)
    assert bits.same_bits_and_finite(array, array.copy()) == (True, False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbouring_floats_are_one_ulp_apart_across_zero_and_exponents(dtype):
    for value in (0.0, 1.0, -1.0, 2.0, 1e-3):
        here = np.array([value], dtype)
        width = here.dtype.itemsize
        word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
        there = (here.view(word) + word(1)).view(dtype)
        assert bits.ulp_distances(here, there).tolist() == [1]


def test_distance_counts_through_zero():
    tiny = np.finfo(np.float32).smallest_subnormal
    assert bits.ulp_distances(np.array([-tiny]), np.array([tiny])).tolist() == [2]


def test_a_difference_in_the_last_block_is_found():
    a = np.ones(3 * bits._BLOCK + 5, np.float32)
    b = a.copy()
    b[-1] = np.nextafter(np.float32(1), np.float32(2))
    assert bits.same_bits_and_finite(a, b) == (False, True)


def test_a_nan_after_the_first_difference_is_still_reported():
    a = np.ones(2 * bits._BLOCK, np.float32)
    b = a.copy()
    b[0], b[-1] = 2, np.nan
    assert bits.same_bits_and_finite(a, b) == (False, False)


def test_strided_views_compare_by_value_order():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert bits.same_bits_and_finite(a.T, np.ascontiguousarray(a.T)) == (True, True)


def test_relative_rms_of_nothing_over_nothing_is_zero_and_of_something_infinite():
    zero = np.zeros(3, np.float32)
    assert bits.relative_rms(zero, zero) == 0.0
    assert bits.relative_rms(zero + 1, zero) == float("inf")


def test_relative_rms_is_taken_in_float64():
    truth = np.full(257, 1.0)
    value = np.full(257, 1.0 + 2**-7, ml_dtypes.bfloat16)
    assert bits.relative_rms(value, truth) == pytest.approx(2**-7)
