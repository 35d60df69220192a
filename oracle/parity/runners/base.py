"""What a runner is: a name, its abilities, and a run that yields a trace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from parity.program import Program
from parity.trace import Feed, Trace
from qwen35.headers import Checkpoint


@dataclass(frozen=True)
class Abilities:
    """What a runner can do. What it cannot is reported as not compared, never as passed."""

    steps: frozenset[str] = frozenset({"prefill", "decode"})
    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    feeds_layers: bool = True
    generations: frozenset[str] = frozenset({"mlx-lm", "transformers"})
    missing_taps: frozenset[str] = field(default_factory=frozenset)


class Runner(Protocol):
    """Runs programs on one checkpoint in one dtype."""

    name: str

    @property
    def abilities(self) -> Abilities:
        """What this runner can do with its checkpoint."""

    def run(
        self, program: Program, feed: Feed | None = None, on_forward: Callable[[], None] = ...
    ) -> Trace:
        """Run `program` from an empty cache and record every tap of every forward.

        With `feed`, each layer is given that residual stream as its input instead of the output
        of the layer before (the outputs are recorded as computed). `on_forward` is called after
        each forward, for progress.
        """


RunnerFactory = Callable[[Checkpoint, str], Runner]
"""(checkpoint, dtype name) -> a runner with its weights loaded in that dtype."""


def cannot(abilities: Abilities, program: Program, dtype: str, generation: str) -> str | None:
    """Return why a runner of these abilities cannot be compared here, or None."""
    if generation not in abilities.generations:
        return f"cannot load a checkpoint in {generation}'s layout"
    if dtype not in abilities.dtypes:
        return f"cannot compute in {dtype}"
    if unable := {step.op for step in program.steps} - abilities.steps:
        return f"cannot do {', '.join(sorted(unable))}"
    return None
