"""The judge on hand-made traces: every verdict, and what makes it."""

import ml_dtypes
import numpy as np
import pytest

from parity import taps
from parity.compare import compare
from parity.policy import Pair, Rule
from parity.trace import Trace

TYPES = ("linear_attention", "full_attention")
IDENTICAL = Pair("free", (Rule(("*",), "identical", "test"),))
ARBITRATED = Pair(
    "free",
    (Rule(("exact",), "identical", "test"), Rule(("*",), "arbitrated", "test", 2.0, 4.0, 0.1)),
)
TAP = "layers.0.linear_attn.q"


def trace(seed=0, dtype=np.float32, forwards=2, noise=0.0):
    rng = np.random.default_rng(seed)
    result = Trace("impl", TYPES)
    for forward in range(forwards):
        for name in taps.order(TYPES):
            value = np.random.default_rng([forward, len(name)]).normal(size=(2, 3, 5))
            value = value + noise * rng.normal(size=(2, 3, 5))
            result.add(
                forward,
                name,
                (0 * value).astype(np.int32) if "offset" in name else value.astype(dtype),
            )
    return result


def judge(candidate, oracle, pair=IDENTICAL, truth=None):
    return compare(candidate, oracle, pair, TYPES, 2, "float32", truth)


def failed(results):
    return [(c.forward, c.tap, c.verdict) for c in results if c.failed]


def test_equal_traces_are_identical_at_every_tap_of_every_forward():
    results = judge(trace(), trace())
    assert len(results) == 2 * len(taps.order(TYPES))
    assert {c.verdict for c in results} == {"identical"}


def test_one_bit_is_found_and_named():
    ours = trace()
    ours.tensors[1, TAP].view(np.uint32)[1, 2, 4] ^= 1
    results = judge(ours, trace())
    assert failed(results) == [(1, TAP, "exceeds")]
    item = next(c for c in results if c.failed)
    assert item.max_ulp == 1
    assert "first at [1, 2, 4]" in item.detail
    assert "1 of 30 elements differ" in item.detail


def test_the_sign_of_a_zero_counts():
    ours, theirs = trace(), trace()
    ours.tensors[0, TAP][0, 0, 0], theirs.tensors[0, TAP][0, 0, 0] = -0.0, 0.0
    assert failed(judge(ours, theirs)) == [(0, TAP, "exceeds")]


def test_a_nan_on_both_sides_is_nonfinite_and_not_identical():
    ours, theirs = trace(), trace()
    ours.tensors[0, TAP][0, 0, 0] = theirs.tensors[0, TAP][0, 0, 0] = np.nan
    assert failed(judge(ours, theirs)) == [(0, TAP, "nonfinite")]


@pytest.mark.parametrize("side", [0, 1])
def test_a_tap_that_either_side_lacks_is_missing(side):
    pair = [trace(), trace()]
    del pair[side].tensors[1, TAP]
    assert failed(judge(*pair)) == [(1, TAP, "missing")]


def test_a_tap_that_both_sides_lack_is_missing():
    ours, theirs = trace(), trace()
    del ours.tensors[1, TAP], theirs.tensors[1, TAP]
    assert failed(judge(ours, theirs)) == [(1, TAP, "missing")]


def test_a_name_that_is_no_tap_is_not_matched_to_a_similar_one():
    ours = trace()
    ours.add(0, TAP + ".weight", np.zeros(1, np.float32))
    assert failed(judge(ours, trace())) == [(0, TAP + ".weight", "missing")]


def test_a_forward_beyond_the_program_is_missing_on_the_other_side():
    assert {f for f, _, _ in failed(judge(trace(forwards=3), trace()))} == {2}


def test_equal_bytes_of_another_shape_are_a_shape():
    ours = trace()
    ours.tensors[0, TAP] = ours.tensors[0, TAP].reshape(3, 2, 5)
    assert failed(judge(ours, trace())) == [(0, TAP, "shape")]


def test_equal_values_of_another_dtype_are_a_dtype():
    values = trace(dtype=ml_dtypes.bfloat16)
    ours = trace(dtype=ml_dtypes.bfloat16)
    ours.tensors[0, TAP] = ours.tensors[0, TAP].astype(np.float32)
    assert failed(judge(ours, values)) == [(0, TAP, "dtype")]


def test_an_error_like_the_oracles_own_is_within():
    truth = trace(dtype=np.float64)
    results = judge(trace(1, noise=1e-5), trace(2, noise=1e-5), ARBITRATED, truth)
    assert failed(results) == []
    assert {c.verdict for c in results if not c.tap.endswith("offset")} == {"within"}


def test_an_error_of_several_times_the_oracles_exceeds():
    truth = trace(dtype=np.float64)
    ours = trace(1, noise=1e-5)
    value = truth.tensors[1, TAP]
    ours.tensors[1, TAP] = (value * (1 + 1e-4)).astype(np.float32)
    results = judge(ours, trace(2, noise=1e-5), ARBITRATED, truth)
    assert failed(results) == [(1, TAP, "exceeds")]
    item = next(c for c in results if c.failed)
    assert item.candidate_to_truth == pytest.approx(1e-4, rel=1e-2)
    assert item.candidate_to_truth > item.bound


def test_an_error_that_is_small_in_each_forward_and_large_over_all_exceeds_once():
    truth = trace(dtype=np.float64)
    ours = trace(1, noise=1e-5)
    for forward in (0, 1):
        exact = truth.tensors[forward, TAP]
        ours.tensors[forward, TAP] = (exact * (1 + 3e-5)).astype(np.float32)
    results = judge(ours, trace(2, noise=1e-5), ARBITRATED, truth)
    (item,) = [c for c in results if c.failed]
    assert item.tap == TAP
    assert item.candidate_to_truth < item.bound
    assert "median over the program: error 3e-05, due at most 2 times" in item.detail


def test_an_oracle_that_is_itself_wrong_excuses_nothing():
    truth = trace(dtype=np.float64)
    ours, theirs = trace(), trace()
    for forward in (0, 1):
        ours.tensors[forward, TAP] = 0 * ours.tensors[forward, TAP]
        theirs.tensors[forward, TAP] = -theirs.tensors[forward, TAP]
    assert {t for _, t, _ in failed(judge(ours, theirs, ARBITRATED, truth))} == {TAP}


def test_a_candidate_in_a_lower_dtype_is_a_dtype_and_not_excused_by_its_rounding():
    truth = trace(dtype=np.float64)
    ours, state = trace(), "layers.0.linear_attn.recurrent_state"
    ours.tensors[0, state] = ours.tensors[0, state].astype(ml_dtypes.bfloat16)
    assert failed(judge(ours, trace(), ARBITRATED, truth)) == [(0, state, "dtype")]


def test_an_oracle_in_another_dtype_is_compared_by_value():
    truth = trace(dtype=np.float64)
    theirs = trace(dtype=np.float64)
    assert failed(judge(trace(), theirs, ARBITRATED, truth)) == []


def test_an_oracle_without_error_still_allows_the_rounding_of_the_dtype():
    truth = trace(dtype=np.float64)
    exact = Trace("transformers", TYPES, tensors=dict(truth.tensors))
    assert failed(judge(trace(), exact, ARBITRATED, truth)) == []


def test_the_first_operation_with_equal_inputs_makes_the_difference_and_later_ones_carry_it():
    ours = trace()
    for name in (TAP, "layers.0.linear_attn.y", "layers.0.linear_attn.norm"):
        ours.tensors[0, name] = ours.tensors[0, name] + 1
    said = {c.tap: c.attribution for c in judge(ours, trace()) if c.failed}
    assert said == {
        TAP: "makes",
        "layers.0.linear_attn.y": "carries",
        "layers.0.linear_attn.norm": "carries",
    }


def test_a_state_carries_what_the_forward_before_left_in_it():
    ours = trace()
    state = "layers.0.linear_attn.recurrent_state"
    for forward in (0, 1):
        ours.tensors[forward, state] = ours.tensors[forward, state] + 1
    said = [(c.forward, c.attribution) for c in judge(ours, trace()) if c.failed]
    assert said == [(0, "makes"), (1, "carries")]


def test_every_tap_names_inputs_that_are_taps():
    names = taps.order(TYPES)
    for name, (at, tap) in names.items():
        now, before = taps.inputs(name, tap, len(TYPES))
        assert set(now + before) <= set(names)
        assert all(names[source][0] < at for source in now)
