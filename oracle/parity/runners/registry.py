"""Runner names and what makes them; frameworks are imported when a runner is asked for."""

from collections.abc import Callable

from parity.program import Program
from parity.runners.base import Abilities, Runner
from qwen35.errors import InputError
from qwen35.headers import Checkpoint


def _impl(checkpoint: Checkpoint, dtype: str) -> Runner:
    from parity.runners.impl import ImplRunner

    return ImplRunner(checkpoint, dtype)


def _mlx_lm(checkpoint: Checkpoint, dtype: str) -> Runner:
    from parity.runners.mlx_lm import MlxLmRunner

    return MlxLmRunner(checkpoint, dtype)


def _transformers(checkpoint: Checkpoint, dtype: str) -> Runner:
    from parity.runners.transformers import TransformersRunner

    return TransformersRunner(checkpoint, dtype)


_RUNNERS: dict[str, tuple[Abilities, Callable[[Checkpoint, str], Runner]]] = {
    "impl": (Abilities(), _impl),
    "mlx-lm": (Abilities(model_types=frozenset({"qwen3_5"})), _mlx_lm),
    "transformers": (Abilities(generations=frozenset({"transformers"})), _transformers),
}

NAMES = tuple(_RUNNERS)


def abilities(name: str) -> Abilities:
    """Return what the runner of this name can do. Raises InputError for an unknown name."""
    if name == "reference":
        raise InputError(
            "reference: it is the float64 arbiter of every arbitrated pair, not a candidate or an "
            "oracle. Use --oracle transformers, whose pairs it arbitrates."
        )
    if name not in _RUNNERS:
        raise InputError(f"{name}: no such runner. Known runners: {', '.join(NAMES)}.")
    return _RUNNERS[name][0]


def open_runner(name: str, checkpoint: Checkpoint, dtype: str) -> Runner:
    """Load a runner's weights. Raises InputError, CheckpointError or CannotRunError."""
    abilities(name)
    return _RUNNERS[name][1](checkpoint, dtype)


def why_not(
    name: str, program: Program, dtype: str, generation: str, model_type: str
) -> str | None:
    """Return why the runner of this name cannot be compared on this case, or None."""
    able = abilities(name)
    if generation not in able.generations:
        return f"{name} cannot load a checkpoint in {generation}'s layout"
    if able.model_types is not None and model_type not in able.model_types:
        return f"{name} does not know model_type {model_type!r}"
    if dtype not in able.dtypes:
        return f"{name} cannot compute in {dtype}"
    if unable := {step.op for step in program.steps} - able.steps:
        return f"{name} cannot do {', '.join(sorted(unable))}"
    return None
