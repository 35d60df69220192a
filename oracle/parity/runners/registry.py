"""Runner names and what makes them; frameworks are imported when a runner is asked for."""

from collections.abc import Callable

from parity.environments import EDITED, VERSIONED, package_folder, pins
from parity.program import Program
from parity.runners.append_only import APPEND_ONLY
from parity.runners.base import ALL_STEPS, Abilities, Runner, RunnerOptions
from qwen35.errors import InputError
from qwen35.headers import Checkpoint


def _impl(name: str, checkpoint: Checkpoint, dtype: str, options: RunnerOptions) -> Runner:
    from parity.runners.impl import ImplRunner
    from qwen35.semantics import PRESETS

    return ImplRunner(checkpoint, dtype, PRESETS[options.semantics])


def _mlx_lm(name: str, checkpoint: Checkpoint, dtype: str, options: RunnerOptions) -> Runner:
    from parity.runners.mlx_lm import MlxLmRunner

    return MlxLmRunner(checkpoint, dtype)


def _transformers(name: str, checkpoint: Checkpoint, dtype: str, options: RunnerOptions) -> Runner:
    from parity.runners.transformers import TransformersRunner

    return TransformersRunner(checkpoint, dtype)


def _worker(name: str, checkpoint: Checkpoint, dtype: str, options: RunnerOptions) -> Runner:
    from parity.runners.worker import WorkerRunner, Workers

    return WorkerRunner(name, checkpoint, dtype, options.workers or Workers())


def _append_only(name: str, checkpoint: Checkpoint, dtype: str, options: RunnerOptions) -> Runner:
    raise InputError(f"{name}: is the candidate itself, run otherwise. Name it with --oracle.")


_ROLLBACK = ("verify", "accept")
_MLX_LM = Abilities(
    steps=frozenset({"prefill", "lengths", "decode", "filter", "extend", "extract"}),
    model_types=frozenset({"qwen3_5"}),
    why_not=dict.fromkeys(_ROLLBACK, "mlx-lm has no rollback for linear layers")
    | dict.fromkeys(("snapshot", "restore"), "its batch caches have no snapshots"),
    shows_states=True,
)
_TRANSFORMERS = Abilities(
    steps=frozenset({"prefill", "decode", "filter", "extract"}),
    generations=frozenset({"transformers"}),
    why_not=dict.fromkeys(_ROLLBACK, "its crop leaves the recurrent state as it was")
    | dict.fromkeys(("snapshot", "restore"), "its cache has no snapshots")
    | {
        "lengths": "right padding still decays its recurrent state",
        "extend": "it has no function that joins caches",
    },
)
_Open = Callable[[str, Checkpoint, str, RunnerOptions], Runner]
_RUNNERS: dict[str, tuple[Abilities, _Open]] = {
    "impl": (Abilities(steps=ALL_STEPS, shows_states=True), _impl),
    "mlx-lm": (_MLX_LM, _mlx_lm),
    "transformers": (_TRANSFORMERS, _transformers),
    APPEND_ONLY: (Abilities(steps=ALL_STEPS), _append_only),
    VERSIONED: (_MLX_LM, _worker),
    EDITED: (_MLX_LM, _worker),
}
NAMES = ("impl", "mlx-lm", "transformers", "append-only", "mlx-lm==VERSION", "mlx-lm@PATH")


def _find(name: str) -> tuple[Abilities, _Open]:
    if name == "reference":
        raise InputError(
            "reference: it is the float64 arbiter of every arbitrated pair, not a candidate or an "
            "oracle. Use --oracle transformers, whose pairs it arbitrates."
        )
    # A worker's name is its prefix and what follows: a version or a path.
    prefix = next((p for p in (VERSIONED, EDITED) if name.startswith(p)), name)
    if prefix not in _RUNNERS or name in (VERSIONED, EDITED):
        raise InputError(f"{name}: no such runner. Known runners: {', '.join(NAMES)}.")
    return _RUNNERS[prefix]


def abilities(name: str) -> Abilities:
    """Return what the runner of this name can do.

    Raises InputError for an unknown name, for what is no version and for a folder without mlx_lm.
    """
    able, _ = _find(name)
    if name.startswith(VERSIONED):
        pins(name.removeprefix(VERSIONED))
    if name.startswith(EDITED):
        package_folder(name)
    return able


def open_runner(
    name: str,
    checkpoint: Checkpoint,
    dtype: str,
    options: RunnerOptions = RunnerOptions(),  # noqa: B008 - frozen
) -> Runner:
    """Load a runner's weights. Raises InputError, CheckpointError or CannotRunError."""
    _, opened = _find(name)
    return opened(name, checkpoint, dtype, options)


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
    if unable := program.needs() - able.steps:
        because = {able.why_not[step] for step in unable if step in able.why_not}
        said = f" ({'; '.join(sorted(because))})" if because else ""
        return f"{name} cannot do {', '.join(sorted(unable))}{said}"
    return None
