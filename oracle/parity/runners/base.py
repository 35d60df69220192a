"""What a runner is: a name, its abilities, and a run that yields a trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parity.program import Program
from parity.states import States
from parity.steps import FIELDS
from parity.trace import Feed, Trace

if TYPE_CHECKING:
    from parity.runners.worker import Workers


ALL_STEPS = frozenset({*FIELDS, "lengths"})


@dataclass(frozen=True)
class Abilities:
    """What a runner can do. What it cannot is reported as not compared, never as passed.

    `steps` are names of steps, and `lengths` for right padding; `why_not` says of those it has not
    why, where there is more to say. `shows_states` is true of a StatefulRunner.
    `model_types` are those of config.json it knows, None for all that the implementation knows.
    """

    steps: frozenset[str] = frozenset({"prefill", "decode"})
    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    generations: frozenset[str] = frozenset({"mlx-lm", "transformers"})
    model_types: frozenset[str] | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)
    shows_states: bool = False


class Runner(Protocol):
    """Runs programs on one checkpoint in one dtype."""

    name: str

    def run(self, program: Program, feed: Feed | None = None) -> Trace:
        """Run `program` from an empty cache and record every tap of every forward.

        With `feed`, each layer is given that residual stream as its input instead of the output
        of the layer before (the outputs are recorded as computed).
        """


class StatefulRunner(Protocol):
    """Shows, for any program it can run, what it holds of each row after each moment."""

    name: str

    def states(self, program: Program) -> States:
        """Run `program` from an empty cache."""


@dataclass(frozen=True)
class RunnerOptions:
    """What runners are opened with, beyond the checkpoint and the dtype.

    `semantics` names the preset of qwen35.semantics that `impl` computes with. `workers` starts and
    keeps the worker processes; without it each runner that needs one has its own.
    """

    semantics: str = "mlx-lm-0.32"
    workers: "Workers | None" = None
