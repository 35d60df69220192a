"""Programs of ragged prompts and row operations, compared with mlx-lm's batch caches."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from parity import policy
from parity.compare import Comparison
from parity.histories import histories
from parity.program import parse
from parity.result import to_json
from parity.run import Target, run
from parity.runners.base import RunnerOptions
from parity.runners.impl import ImplRunner
from parity.runners.mlx_lm import MlxLmRunner
from parity.states import compare_states
from parity.taps import LINEAR
from qwen35.headers import open_checkpoint

Steps = list[dict[str, Any]]
_RNG = np.random.default_rng(11)


def prompt(rows: int, tokens: int, **options: Any) -> dict[str, Any]:
    """Return a prefill of drawn ids."""
    return {"op": "prefill", "ids": _RNG.integers(0, 53, (rows, tokens)).tolist(), **options}


def decodes(rows: int, count: int = 1) -> Steps:
    return [{"op": "decode", "ids": prompt(rows, 1)["ids"]} for _ in range(count)]


PROGRAMS: dict[str, Steps] = {
    "lengths 1 to the kernel, and longer": [prompt(5, 6, lengths=[1, 2, 3, 4, 6]), *decodes(5, 2)],
    "empty rows": [prompt(3, 5, lengths=[0, 5, 2]), *decodes(3), prompt(3, 2, lengths=[2, 0, 1])],
    "all rows empty": [prompt(2, 3, lengths=[0, 0]), *decodes(2), prompt(2, 4, lengths=[4, 1])],
    "padding longer than a chunk and than the kernel": [
        prompt(3, 12, lengths=[2, 12, 7], chunk=3),
        prompt(3, 9, lengths=[9, 1, 0], chunk=4),
        *decodes(3),
    ],
    "padding of any id": [
        {"op": "prefill", "ids": [[1, 2, 3, 4], [5, 10**9, -1, 96]], "lengths": [4, 1]},
        *decodes(2),
    ],
    "filter": [prompt(4, 6, lengths=[6, 1, 4, 3]), {"op": "filter", "rows": [3, 1]}, *decodes(2)],
    "filter, all rows in another order": [
        prompt(3, 6, lengths=[6, 1, 4]),
        {"op": "filter", "rows": [2, 0, 1]},
        prompt(3, 4, lengths=[1, 4, 0]),
    ],
    "extend by longer rows": [
        prompt(2, 4, lengths=[4, 1]),
        {"op": "extend", "program": [prompt(2, 9, lengths=[9, 3]), *decodes(2)]},
        *decodes(4, 2),
    ],
    "extend by shorter rows": [
        prompt(2, 9, lengths=[9, 3]),
        {"op": "extend", "program": [prompt(1, 2)]},
        prompt(3, 3, lengths=[0, 3, 2]),
    ],
    "extend by a row that has seen nothing": [
        prompt(1, 4),
        {"op": "extend", "program": [prompt(1, 2, lengths=[0])]},
        *decodes(2),
    ],
    "extract a row that has seen nothing": [
        prompt(2, 3, lengths=[0, 3]),
        {"op": "extract", "row": 0},
        prompt(1, 3, lengths=[2]),
    ],
    "extract, and rows that join it": [
        prompt(3, 7, lengths=[7, 2, 5]),
        {"op": "extract", "row": 1},
        *decodes(1),
        {"op": "extend", "program": [prompt(3, 5, lengths=[1, 5, 0]), {"op": "extract", "row": 0}]},
        *decodes(2),
    ],
}


def judged(
    checkpoints: Any,
    steps: Steps,
    dtype: str = "float32",
    oracle: str = "mlx-lm",
    candidate: str = "impl",
    options: RunnerOptions = RunnerOptions(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Compare the states of a program on `tiny`; return the result as JSON values."""
    checkpoint = open_checkpoint(checkpoints.path("tiny", dtype))
    programs = {"p": parse({"schema": 1, "steps": steps})}
    target = Target("tiny", checkpoint, "transformers", dtype, programs, "parity run")
    result = run([target], candidate, [oracle], policy.load(), options=options)
    return to_json(result, "parity run", 0)


@cache
def runners(path: Path, dtype: str) -> tuple[ImplRunner, MlxLmRunner]:
    """Return both, loaded once a session."""
    checkpoint = open_checkpoint(path)
    return ImplRunner(checkpoint, dtype), MlxLmRunner(checkpoint, dtype)


def compared(
    checkpoints: Any, steps: Steps, dtype: str = "float32", label: str = "tiny"
) -> list[Comparison]:
    """Compare all states of a program, and see that none is left out."""
    ours, theirs = runners(checkpoints.path(label, dtype), dtype)
    pair = policy.load().pair("impl", "mlx-lm", dtype)
    assert pair is not None
    program = parse({"schema": 1, "steps": steps})
    layers = theirs.layer_types
    found = compare_states(ours.states(program), theirs.states(program), pair, layers)
    assert len(found) == due(steps, layers)
    return found


def due(steps: Steps, layers: tuple[str, ...]) -> int:
    """Return how many states are to be compared with a runner that does not count in linear layers.

    Two of each row and linear layer, three of each attention layer, and the logits of each row that
    had tokens.
    """
    program = parse({"schema": 1, "steps": steps})
    rows = sum(len(tokens) for tokens in histories(program))
    logits = sum(int((m.tokens > 0).sum()) for m in program.moments() if m.is_forward)
    return rows * sum(2 if kind == LINEAR else 3 for kind in layers) + logits
