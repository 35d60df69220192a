"""The judge on hand-made traces: every verdict, and what makes it."""

import ml_dtypes
import numpy as np
import pytest

from parity import taps
from parity.arbitrate import Arbiter
from parity.compare import compare
from parity.policy import Pair, Rule
from parity.roundings import Roundings
from parity.trace import Trace
from qwen35.errors import InputError

TYPES = ("linear_attention", "full_attention")
IDENTICAL = Pair("free", (Rule(("*",), "identical", "test"),))
ARBITRATED = Pair(
    "free",
    (
        Rule(("exact",), "identical", "test"),
        Rule(("*",), "arbitrated", "test", 2.0, 4.0, 8.0, 0.1),
    ),
)
TAP = "layers.0.linear_attn.q"


def trace(seed=0, dtype=np.float32, forwards=2, noise=0.0, tokens=8):
    rng = np.random.default_rng(seed)
    result = Trace("impl", TYPES)
    for forward in range(forwards):
        for name in taps.order(TYPES):
            value = np.random.default_rng([forward, len(name)]).normal(size=(2, tokens, 5))
            value = value + noise * rng.normal(size=(2, tokens, 5))
            result.add(
                forward,
                name,
                (0 * value).astype(np.int32) if "offset" in name else value.astype(dtype),
            )
    return result


def judge(candidate, oracle, pair=IDENTICAL, truth=None, rounding=1e-5):
    """Judge; rounding alone is said to make the same error everywhere."""
    arbiter = None
    if truth is not None:
        found = Roundings(truth, "float32")
        for place, exact in truth.tensors.items():
            found.vectors[place] = np.full((6, exact[..., 0].size), rounding)
            found.rms[place] = np.full(6, rounding)
        arbiter = Arbiter(candidate, oracle, truth, found)
    return compare(candidate, oracle, pair, TYPES, 2, "float32", arbiter)


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
    assert "1 of 80 elements differ" in item.detail


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
    ours.tensors[0, TAP] = ours.tensors[0, TAP].reshape(8, 2, 5)
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


def wrong(results):
    return {(c.forward, c.tap): (c.wrong, c.detail) for c in results if c.failed}


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
    assert item.wrong == "candidate"


def systematic(tokens):
    """A candidate, an oracle and the truth: 3e-5 off in every forward of TAP."""
    truth, ours = trace(dtype=np.float64, tokens=tokens), trace(1, noise=1e-5, tokens=tokens)
    for forward in (0, 1):
        exact = truth.tensors[forward, TAP]
        ours.tensors[forward, TAP] = (exact * (1 + 3e-5)).astype(np.float32)
    return ours, trace(2, noise=1e-5, tokens=tokens), truth


def test_an_error_that_is_small_in_each_forward_and_large_over_all_exceeds_once():
    ours, theirs, truth = systematic(tokens=8)
    results = judge(ours, theirs, ARBITRATED, truth)
    (item,) = [c for c in results if c.failed]
    assert item.tap == TAP
    assert item.candidate_to_truth < item.bound
    assert "in the median over the program the candidate's error is 3e-05, due at most 2 times" in (
        item.detail
    )


def test_a_median_over_few_tokens_is_held_to_the_factor_of_one_forward():
    ours, theirs, truth = systematic(tokens=3)  # 12 tokens in two rows and forwards
    assert failed(judge(ours, theirs, ARBITRATED, truth)) == []


def test_one_vector_that_is_wholly_wrong_is_found_among_many():
    truth = trace(dtype=np.float64, tokens=600)
    ours, theirs = trace(1, noise=5e-3, tokens=600), trace(2, noise=5e-3, tokens=600)
    ours.tensors[0, TAP][1, 77] *= -1
    results = judge(ours, theirs, ARBITRATED, truth, rounding=0.02)
    (item,) = [c for c in results if c.failed]
    assert item.candidate_to_truth < item.bound
    assert item.detail.startswith("at [1, 77]: the candidate's error is 2")


@pytest.mark.parametrize("right", [True, False])
def test_an_oracle_that_is_itself_wrong_excuses_nothing_and_is_named(right):
    truth = trace(dtype=np.float64)
    ours, theirs = trace(1, noise=1e-6), trace(2, noise=1e-6)
    for forward in (0, 1):
        theirs.tensors[forward, TAP] = theirs.tensors[forward, TAP] * np.float32(1.003)
        if not right:
            ours.tensors[forward, TAP] = ours.tensors[forward, TAP] * np.float32(1.003)
    said = wrong(judge(ours, theirs, ARBITRATED, truth))
    assert said.keys() == {(0, TAP), (1, TAP)}
    assert {who for who, _ in said.values()} == {"oracle" if right else "both"}
    assert all(
        "the oracle's error is 0.003, due at most 4 times 1e-05" in d for _, d in said.values()
    )


def test_the_same_wrong_bits_on_both_sides_are_not_identical():
    truth = trace(dtype=np.float64)
    ours, theirs = trace(), trace()
    for side in (ours, theirs):
        side.tensors[0, TAP] = side.tensors[0, TAP] * 2
    assert wrong(judge(ours, theirs, ARBITRATED, truth))[0, TAP][0] == "both"


def test_an_input_on_which_rounding_grows_allows_more_there():
    truth = trace(dtype=np.float64)
    ours = trace(1, noise=1e-4)
    assert failed(judge(ours, trace(2, noise=1e-6), ARBITRATED, truth, rounding=1e-4)) == []
    assert failed(judge(ours, trace(2, noise=1e-6), ARBITRATED, truth, rounding=1e-6)) != []


def test_a_tap_that_the_truth_lacks_is_missing():
    truth = trace(dtype=np.float64)
    del truth.tensors[1, TAP]
    assert failed(judge(trace(), trace(), ARBITRATED, truth)) == [(1, TAP, "missing")]


def test_a_trace_of_other_layers_is_refused():
    other = trace()
    other.layer_types = TYPES[::-1]
    with pytest.raises(InputError, match="Compare traces of one model"):
        judge(other, trace())


def test_a_candidate_in_a_lower_dtype_is_a_dtype_and_not_excused_by_its_rounding():
    truth = trace(dtype=np.float64)
    ours, state = trace(), "layers.0.linear_attn.recurrent_state"
    ours.tensors[0, state] = ours.tensors[0, state].astype(ml_dtypes.bfloat16)
    assert failed(judge(ours, trace(), ARBITRATED, truth))[0] == (0, state, "dtype")


def test_an_oracle_in_another_dtype_is_compared_by_value():
    truth = trace(dtype=np.float64)
    theirs = trace(dtype=np.float64)
    assert failed(judge(trace(), theirs, ARBITRATED, truth)) == []


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
