"""The comparison of states: each kind of difference is a verdict with its moment, name and row."""

import numpy as np
import pytest

from parity import policy
from parity.states import States, compare_states, names
from parity.taps import FULL, LINEAR

LAYERS = (LINEAR, FULL)
PAIR = policy.load().pair("impl", "append-only", "float32")
TAIL, KEYS = "layers.0.linear_attn.conv_tail", "layers.1.self_attn.keys"
COUNT = "layers.0.linear_attn.offset"


def states(runner="impl", rows=2, moments=2):
    held = {name: np.full((2, 3), 0.5, np.float32) for name in names(LAYERS)}
    return States(runner, LAYERS, {}, [[dict(held) for _ in range(rows)] for _ in range(moments)])


def failed(ours, theirs):
    found = compare_states(ours, theirs, PAIR, LAYERS)
    return [(c.forward, c.tap, c.row, c.verdict) for c in found if c.failed]


def test_equal_states_are_identical_one_comparison_a_state():
    found = compare_states(states(), states("append-only"), PAIR, LAYERS)
    assert [c.verdict for c in found] == ["identical"] * 2 * 2 * len(names(LAYERS))
    assert [c.tap for c in found][:4] == [TAIL, TAIL] + ["layers.0.linear_attn.recurrent_state"] * 2


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (np.full((2, 3), np.nextafter(np.float32(0.5), 1), np.float32), "exceeds"),
        (np.full((2, 3), np.nan, np.float32), "nonfinite"),
        (np.full((2, 3), 0.5, np.float16), "dtype"),
        (np.full((3, 2), 0.5, np.float32), "shape"),
        (None, "missing"),
    ],
)
def test_each_difference_is_a_verdict_with_its_place(value, verdict):
    ours = states()
    if value is None:
        del ours.moments[1][1][KEYS]
    else:
        ours.moments[1][1][KEYS] = value
    assert failed(ours, states()) == [(1, KEYS, 1, verdict)]
    found = next(c for c in compare_states(ours, states(), PAIR, LAYERS) if c.failed)
    assert found.detail.startswith("row 1: ")


def test_minus_zero_is_not_zero():
    ours, theirs = states(), states()
    ours.moments[0][0][TAIL] = np.zeros((2, 3), np.float32)
    theirs.moments[0][0][TAIL] = -np.zeros((2, 3), np.float32)
    assert failed(ours, theirs) == [(0, TAIL, 0, "exceeds")]


def test_what_both_sides_lack_is_missing_unless_it_is_optional():
    ours, theirs = states(), states()
    for side in (ours, theirs):
        for name in (COUNT, "logits", KEYS):
            del side.moments[0][0][name]
    assert failed(ours, theirs) == [(0, KEYS, 0, "missing")]


def test_a_row_or_moment_too_few_is_missing():
    rows = failed(states(rows=1), states())
    assert {(moment, row, verdict) for moment, _, row, verdict in rows} == {
        (0, 1, "missing"),
        (1, 1, "missing"),
    }
    assert {c[0] for c in failed(states(), states(moments=1))} == {1}


def test_a_name_that_is_no_state_is_reported():
    ours = states()
    ours.moments[0][1]["layers.0.state"] = np.zeros(1)
    assert failed(ours, states()) == [(0, "layers.0.state", 1, "missing")]
