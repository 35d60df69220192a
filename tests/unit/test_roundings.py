"""What rounding alone makes of a program, on real small checkpoints and by hand."""

import numpy as np
import pytest

from parity.program import build
from parity.reference import ReferenceRunner
from parity.roundings import GRIDS, Roundings, roundings
from parity.trace import Trace, feed_from

TYPES = ("linear_attention", "full_attention")
PROGRAM = build([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], decode=1, chunk=2)
STATE = "layers.0.linear_attn.recurrent_state"


@pytest.fixture
def reference(checkpoints):
    return lambda dtype: ReferenceRunner(checkpoints.path("tiny", dtype), dtype)


def test_each_grids_rows_are_rounded_on_their_own_grid():
    exact = np.array([[[1.0 + 2.0**-30]], [[3.0]]])
    truth = Trace("reference", TYPES, tensors={(0, "embed_tokens"): exact})
    found = Roundings(truth, "float32", grids=(1.0, 1.5))
    rows = found.add(0, "embed_tokens", np.tile(exact, (2, 1, 1))).reshape(2, *exact.shape)
    assert rows[0, 0] == 1.0
    assert rows[1, 0] == np.float64(np.float32(1.5 * exact[0, 0, 0])) / 1.5
    assert found.vectors[0, "embed_tokens"][:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 2.0**-24), ("bfloat16", 2.0**-9)])
def test_the_first_taps_errors_are_those_of_one_rounding(reference, dtype, epsilon):
    runner = reference(dtype)
    found = roundings(runner, PROGRAM, runner.run(PROGRAM))
    errors = found.rms[0, "layers.0.input_layernorm"]
    assert errors.shape == (len(GRIDS),)
    assert np.all((epsilon / 4 < errors) & (errors < 4 * epsilon))
    assert len(set(errors.tolist())) == len(GRIDS)


def test_states_are_rounded_to_float32_whatever_the_dtype(reference):
    truth = reference("bfloat16").run(PROGRAM)
    found = Roundings(truth, "bfloat16")
    value = np.tile(truth.tensors[0, STATE], (len(GRIDS), 1, 1, 1))
    found.add(0, STATE, value)
    assert found.rms[0, STATE].max() < 2.0**-24


def test_every_tap_of_every_forward_has_errors_and_they_grow_with_depth(reference):
    runner = reference("float32")
    truth = runner.run(PROGRAM)
    found = roundings(runner, PROGRAM, truth)
    floats = {place for place in truth.tensors if not place[1].endswith("offset")}
    assert found.vectors.keys() == floats
    assert np.median(found.vectors[0, "logits"]) > np.median(found.vectors[0, "embed_tokens"])


def test_a_fed_layer_starts_from_what_it_is_fed(reference):
    runner = reference("bfloat16")
    free = runner.run(PROGRAM)
    feed = feed_from(free)
    fed = roundings(runner, PROGRAM, runner.run(PROGRAM, feed), feed)
    alone = roundings(runner, PROGRAM, free)
    deepest = "layers.6.input_layernorm"
    assert np.median(fed.vectors[0, deepest]) < np.median(alone.vectors[0, deepest]) / 3


def test_the_exact_run_is_unchanged_by_it(reference):
    runner = reference("float32")
    before = runner.run(PROGRAM)
    roundings(runner, PROGRAM, before)
    after = runner.run(PROGRAM)
    assert all(
        np.array_equal(before.tensors[place], after.tensors[place]) for place in after.tensors
    )
