"""Rows that are chosen between forwards, where taps are compared and arbitrated."""

import numpy as np
import pytest
from batch_programs import decodes, judged, prompt

from parity.program import parse
from parity.runners.mlx_lm import MlxLmRunner
from parity.runners.transformers import TransformersRunner
from parity.steps import Step
from qwen35.cache import Cache
from qwen35.headers import open_checkpoint

FILTER, EXTRACT = {"op": "filter", "rows": [2, 0]}, {"op": "extract", "row": 1}
STEPS = [prompt(3, 5), FILTER, *decodes(2), EXTRACT, prompt(1, 3)]


def program(steps):
    return parse({"schema": 1, "steps": steps})


def test_choices_are_those_since_the_forward_before():
    steps = [prompt(3, 5), FILTER, EXTRACT, *decodes(1, 2), {"op": "extract", "row": 0}]
    assert program(steps).chosen_rows() == [None, [0], None]
    assert program(STEPS).chosen_rows() == [None, [2, 0], [1]]
    assert program([prompt(3, 6, chunk=2), FILTER, *decodes(2)]).chosen_rows() == [
        None,
        None,
        None,
        [2, 0],
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_arbitrates_programs_that_choose_rows(dtype, checkpoints):
    value = judged(checkpoints, STEPS, dtype, "transformers")
    assert value["verdict"] == "holds", value["first_divergence"]
    assert value["compared"] > 0


def test_rows_in_the_wrong_order_are_caught_at_their_moment(monkeypatch, checkpoints):
    real = Cache.filter
    monkeypatch.setattr(Cache, "filter", lambda self, rows: real(self, sorted(rows)))
    value = judged(checkpoints, STEPS, "float32", "transformers")
    first = value["first_divergence"]
    assert (first["step"], first["step_label"]) == (2, "decode 1 tokens a row")
    assert first["tap"] == "layers.0.linear_attn.conv_tail"


@pytest.mark.parametrize("runner", [TransformersRunner, MlxLmRunner])
def test_a_chosen_row_is_that_row_run_alone(runner, checkpoints):
    opened = runner(open_checkpoint(checkpoints.path("tiny", "float32")), "float32")
    last = opened.run(program(STEPS)).tensors[2, "logits"]
    row = program(STEPS).steps
    alone = tuple(Step("prefill", step.ids[at : at + 1]) for step, at in ((row[0], 0), (row[2], 1)))
    value = opened.run(type(program(STEPS))((*alone, row[4]))).tensors[2, "logits"]
    assert np.abs(last - value).max() < 1e-4 * np.abs(value).max()


def test_what_transformers_cannot_do_says_why(checkpoints):
    steps = [prompt(2, 3, lengths=[3, 1]), {"op": "extend", "program": [prompt(1, 2)]}]
    (left_out,) = judged(checkpoints, steps, oracle="transformers")["pairs"]["transformers"][
        "not_compared"
    ]
    assert "right padding still decays its recurrent state" in left_out["reason"]
    assert "no function that joins caches" in left_out["reason"]
