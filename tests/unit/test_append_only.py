"""Stateful programs from the file to the verdict."""

import json

import numpy as np
import pytest
from tiny_models import tiny_model

from parity import policy
from parity.program import parse
from parity.result import exit_code, to_json
from parity.run import Target, run
from parity.runners.append_only import AppendOnly
from parity.runners.impl_states import impl_states
from qwen35.delta_net import GatedDeltaNet
from qwen35.errors import InputError

STEPS = [
    {"op": "prefill", "ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "lengths": [4, 1]},
    {"op": "verify", "ids": [[9, 10, 11], [12, 13, 14]]},
    {"op": "accept", "keep": [1, 2]},
    {"op": "decode", "ids": [[3], [4]]},
]


def judge(checkpoints, steps=STEPS, oracles=("append-only",), candidate="impl"):
    target = checkpoints.target("tiny", "float32", "one-shot")
    program = parse({"schema": 1, "steps": steps})
    asked = Target(target.label, target.checkpoint, target.generation, "float32", {}, "parity run")
    asked.programs["p"] = program
    return to_json(run([asked], candidate, oracles, policy.load()), "parity run", 0)


def test_a_stateful_program_holds_against_its_tokens_alone(checkpoints):
    value = judge(checkpoints)
    states = 2 * (5 * 3 + 2 * 3)  # rows, linear layers, attention layers
    assert value["verdict"] == "holds"
    assert value["compared"] == 4 * states + 3 * 2  # moments, and the logits of three forwards
    assert value["cases"][0]["steps"] == [
        "prefill 1 or 4 tokens a row",
        "verify 3 tokens a row",
        "accept 1 2",
        "decode 1 tokens a row",
    ]


def test_a_difference_names_moment_state_and_row(checkpoints, monkeypatch):
    real = GatedDeltaNet.replay
    short = lambda self, record, keep: real(self, record, np.maximum(keep - 1, 0))
    monkeypatch.setattr(GatedDeltaNet, "replay", short)
    value = judge(checkpoints)
    first = value["first_divergence"]
    assert (value["verdict"], exit_code(value)) == ("differs", 1)
    assert (first["step"], first["step_label"]) == (2, "accept 1 2")
    assert (first["tap"], first["row"]) == ("layers.0.linear_attn.conv_tail", 0)
    assert first["detail"].startswith("row 0: first at ")


def test_runners_that_cannot_say_why_and_nothing_is_passed(checkpoints):
    value = judge(checkpoints, oracles=("mlx-lm", "transformers"))
    said = {name: pair["not_compared"][0]["reason"] for name, pair in value["pairs"].items()}
    assert (value["verdict"], exit_code(value)) == ("not-run", 5)
    assert "mlx-lm has no rollback" in said["mlx-lm"]
    assert "its crop leaves the recurrent state" in said["transformers"]
    assert "right padding still decays" in said["transformers"]


def test_a_candidate_that_shows_no_states_is_not_compared(checkpoints):
    plain = [{"op": "prefill", "ids": [[1, 2, 3]]}]
    value = judge(checkpoints, plain, candidate="transformers")
    (left_out,) = value["pairs"]["append-only"]["not_compared"]
    assert "transformers does not show its states" in left_out["reason"]


def test_append_only_is_no_candidate(checkpoints):
    with pytest.raises(InputError, match="append-only: is an oracle alone"):
        judge(checkpoints, oracles=("impl",), candidate="append-only")


def test_each_history_is_run_once_and_whole():
    runs = []

    class Counted:
        name = "impl"

        def states(self, program):
            runs.append(json.dumps(program.to_json()["steps"]))
            return impl_states(tiny_model(), "float32", program)

    program = parse({"schema": 1, "steps": STEPS})
    AppendOnly(Counted()).states(program)
    assert len(runs) == len(set(runs)) == 2 * 4
    assert all(json.loads(run)[0]["op"] == "prefill" for run in runs)
