"""Ragged prompts and row operations: the states are mlx-lm's, bit for bit."""

import pytest
from batch_programs import PROGRAMS, Steps, compared, decodes, due, judged, prompt, runners
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_strategies import ids, prefills

from parity import policy
from parity.program import parse
from parity.runners.append_only import AppendOnly
from parity.states import compare_states


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_state_of_every_row_is_mlx_lms(name, dtype, checkpoints):
    found = compared(checkpoints, PROGRAMS[name], dtype)
    assert [c for c in found if c.verdict != "identical"] == []


def test_a_run_compares_them_and_names_the_moments(checkpoints):
    value = judged(checkpoints, PROGRAMS["extract, and rows that join it"], "bfloat16")
    assert (value["verdict"], value["pairs"]["mlx-lm"]["identical"]) == ("holds", value["compared"])
    assert value["cases"][0]["steps"][1:4] == [
        "extract 1",
        "decode 1 tokens a row",
        "extend by prefill, extract",
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_mlx_lm_itself_leaves_what_each_rows_tokens_alone_leave(name, checkpoints):
    path = checkpoints.path("tiny", "float32")
    runner, program = runners(path, "float32")[1], parse({"schema": 1, "steps": PROGRAMS[name]})
    pair = policy.load().pair("mlx-lm", "append-only", "float32")
    alone = AppendOnly(runner).states(program)
    found = compare_states(runner.states(program), alone, pair, runner.layer_types)
    assert len(found) == due(PROGRAMS[name], runner.layer_types)
    assert [c for c in found if c.verdict != "identical"] == []


@st.composite
def batch_programs(draw: st.DrawFn) -> Steps:
    """Draw steps that mlx-lm's batch caches can do, on at most five rows."""
    rows = draw(st.integers(1, 3))
    steps = [draw(prefills(rows, ragged=True))]
    for kind in draw(st.lists(st.sampled_from(["prefill", "filter", "extend", "extract"]))):
        if kind == "filter":
            order = draw(st.permutations(range(rows)))
            rows = draw(st.integers(1, rows))
            steps.append({"op": "filter", "rows": order[:rows]})
        elif kind == "extract":
            steps.append({"op": "extract", "row": draw(st.integers(0, rows - 1))})
            rows = 1
        elif kind == "extend" and rows < 4:
            more = draw(st.integers(1, 2))
            steps.append({"op": "extend", "program": [draw(prefills(more))]})
            rows += more
        else:
            steps.append(draw(prefills(rows)))
    return [*steps, {"op": "decode", "ids": draw(ids(rows, 1))}]


@pytest.mark.parametrize("label", ["tiny", "tiny-k3"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=batch_programs())
def test_any_such_program_leaves_mlx_lms_states(label, steps, checkpoints):
    found = compared(checkpoints, steps, label=label)
    assert [c for c in found if c.verdict != "identical"] == []


@pytest.mark.parametrize(
    ("steps", "because"),
    [
        ([{"op": "verify", "ids": [[1, 2]]}, {"op": "accept", "keep": 1}], "no rollback"),
        ([prompt(1, 2), {"op": "snapshot", "name": "a"}], "have no snapshots"),
    ],
)
def test_what_mlx_lm_has_not_is_not_compared_and_says_why(steps, because, checkpoints):
    value = judged(checkpoints, steps)
    (left_out,) = value["pairs"]["mlx-lm"]["not_compared"]
    assert (value["verdict"], value["compared"]) == ("not-run", 0)
    assert because in left_out["reason"]


def test_between_chunks_a_row_shows_its_own_tokens_alone(checkpoints):
    runner = runners(checkpoints.path("tiny", "float32"), "float32")[1]
    steps = [prompt(2, 9, lengths=[9, 4], chunk=3), *decodes(2)]
    states = runner.states(parse({"schema": 1, "steps": steps}))
    counts = [[int(row["layers.3.self_attn.offset"][0]) for row in rows] for rows in states.moments]
    shapes = [[row["layers.3.self_attn.keys"].shape[1] for row in rows] for rows in states.moments]
    assert counts == shapes == [[3, 3], [6, 4], [9, 4], [10, 5]]
    assert ["logits" in row for rows in states.moments for row in rows] == [True] * 5 + [
        False,
        True,
        True,
    ]
