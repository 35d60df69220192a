"""Runners `mlx-lm@PATH`: the fault of an edited copy of mlx-lm is found at its place."""

import os
from dataclasses import dataclass

import mlx_lm
import pytest
from workers.edited import edited_copy

from parity import policy
from parity.result import to_json
from parity.run import run
from parity.runners.base import RunnerOptions
from parity.runners.worker import Workers
from qwen35.errors import CannotRunError

CASE = ("tiny-k3", "float32", "chunk-2")
RULE, MODEL = "models/gated_delta.py", "models/qwen3_5.py"


@dataclass(frozen=True)
class Fault:
    """One text replaced by another, and the first tap to differ."""

    file: str
    old: str
    new: str
    tap: str


FAULTS = {
    "decay left out": Fault(
        RULE, "state = state * decay\n", "state = state\n", "layers.0.linear_attn.y"
    ),
    "heads repeated by tiling": Fault(
        RULE,
        "q = mx.repeat(q, repeat_factor, -2)\n        k = mx.repeat(k, repeat_factor, -2)",
        "q = mx.tile(q, (1, 1, repeat_factor, 1))\n"
        "        k = mx.tile(k, (1, 1, repeat_factor, 1))",
        "layers.0.linear_attn.y",
    ),
    "gains not shifted": Fault(MODEL, "v + 1.0", "v", "layers.0.input_layernorm"),
}


def judged(target, oracle, timeout=120.0):
    with Workers(timeout=timeout) as workers:
        options = RunnerOptions(workers=workers)
        result = run([target], "impl", [oracle], policy.load(), options=options)
    return to_json(result, "parity run", 0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_copy_is_found_at_its_tap(checkpoints, tmp_path, name):
    fault = FAULTS[name]
    oracle = f"mlx-lm@{edited_copy(tmp_path, fault.file, fault.old, fault.new)}"
    value = judged(checkpoints.target(*CASE), oracle)
    first = value["first_divergence"]
    assert (first["tap"], first["attribution"]) == (fault.tap, "makes")


def test_an_unchanged_copy_that_prints_is_bit_identical_and_is_what_ran(checkpoints, tmp_path):
    noise = "import os\n\nprint('noise')\nos.write(1, b'more noise\\n')\n"
    copy = edited_copy(tmp_path, "__init__.py", "import os\n", noise)
    oracle = f"mlx-lm@{copy}"
    value = judged(checkpoints.target(*CASE), oracle)
    assert value["pairs"][oracle]["identical"] == value["compared"] > 0
    facts = value["environment"]["runners"][oracle]
    assert facts["mlx-lm from"].startswith(str(tmp_path) + os.sep)
    assert facts["mlx-lm"] == mlx_lm.__version__


def test_being_fed_travels_over_files_without_a_bit_lost(checkpoints, tmp_path):
    from parity.runners.registry import open_runner
    from parity.trace import feed_from

    target = checkpoints.target("tiny-k3", "bfloat16", "chunk-2")
    (program,) = target.programs.values()
    with Workers(timeout=120) as workers:
        options = RunnerOptions(workers=workers)
        near = open_runner("mlx-lm", target.checkpoint, target.dtype)
        far = open_runner(
            f"mlx-lm@{edited_copy(tmp_path)}", target.checkpoint, target.dtype, options
        )
        feed = feed_from(far.run(program))
        ours, theirs = near.run(program, feed), far.run(program, feed)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, value in ours.tensors.items():
        assert value.dtype == theirs.tensors[key].dtype
        assert value.tobytes() == theirs.tensors[key].tobytes()


def test_an_error_raised_in_a_copy_is_named_with_its_place(checkpoints, tmp_path):
    copy = edited_copy(tmp_path, RULE, "    beta = mx.sigmoid(b)\n", "    beta = undefined(b)\n")
    with pytest.raises(CannotRunError) as caught:
        judged(checkpoints.target(*CASE), f"mlx-lm@{copy}")
    message = f"mlx-lm@{copy}: NameError: name 'undefined' is not defined ({copy}/mlx_lm/{RULE}, "
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
