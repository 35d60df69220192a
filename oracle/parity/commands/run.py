"""`parity run`: programs on a candidate and its oracles, judged tensor by tensor."""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.commands import EXIT_CODES
from parity.commands.models import model_folder
from parity.commands.worker_options import add_worker_options, make_workers
from qwen35.errors import CannotRunError, InputError
from qwen35.semantics import PRESETS

if TYPE_CHECKING:
    from parity.run import Target

DTYPES = ("float32", "float16", "bfloat16")
_REPEATED = ("candidate", "semantics", "seed", "device", "policy", "cache")


def add(commands: Any) -> None:
    """Add the command's parser."""
    run = commands.add_parser(
        "run",
        help="run programs on a candidate and its oracles, and judge every tensor",
        description="Without --model, runs the default suite on checkpoints made on the spot by "
        "transformers and mlx-lm.",
    )
    run.add_argument("--model", help="checkpoint folder or hub id (a local folder comes first)")
    run.add_argument("--candidate", default="impl", help="runner to be judged (default: impl)")
    run.add_argument(
        "--oracle",
        action="append",
        help="runner to judge by; repeatable (default: mlx-lm and transformers); mlx-lm==VERSION "
        "runs in an environment of its own, mlx-lm@PATH a checkout or edited copy",
    )
    run.add_argument(
        "--semantics",
        choices=tuple(PRESETS),
        default="mlx-lm-0.32",
        help="the version of the model's definition that impl computes (default: mlx-lm-0.32)",
    )
    run.add_argument("--program", help="program file (JSON) to run on --model")
    run.add_argument(
        "--dtype",
        choices=DTYPES,
        help="compute in this dtype (default: the checkpoint's own; the suite runs all three)",
    )
    run.add_argument(
        "--case",
        action="append",
        metavar="PATTERN",
        help="run only the suite's cases that match, e.g. 'tiny/*/float32/*'; repeatable",
    )
    run.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="MLX device")
    run.add_argument(
        "--require-device",
        action="store_true",
        help="fail (exit 3) when the device is absent, instead of reporting the run as not run",
    )
    run.add_argument("--seed", type=int, default=0, help="draws weights and ids (default: 0)")
    run.add_argument("--policy", help="policy file (TOML); default: the one shipped")
    add_worker_options(run)
    run.add_argument(
        "--fail-fast",
        action="store_true",
        help="stop after the first checkpoint with a failing case",
    )
    run.add_argument("--json", metavar="FILE", help="write the result as JSON")
    run.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    run.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    run.add_argument("--markdown", metavar="FILE", help="write the summary as Markdown")
    run.set_defaults(function=_run, failed=_write_not_run)


def _run(options: argparse.Namespace, command: str) -> int:
    from parity import policy, suite
    from parity.result import exit_code, to_json
    from parity.run import run
    from parity.runners.base import RunnerOptions
    from parity.runners.registry import abilities

    for name in ("model", "program", "policy", "json", "html", "junit", "markdown"):
        if getattr(options, name) == "":  # an unset variable must not choose the suite
            raise InputError(f"--{name}: is empty. Name a path, or leave the option out.")
    if options.case and options.model:
        raise InputError("--case chooses from the suite. Drop it, or drop --model.")
    if options.program and not options.model:
        raise InputError("--program runs on a checkpoint. Add --model DIR.")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: is negative. Give 0 or more.")
    rules = policy.load(options.policy or policy.DEFAULT)
    oracles = options.oracle or [n for n in ("mlx-lm", "transformers") if n != options.candidate]
    for name in (options.candidate, *oracles):
        abilities(name)
    if options.semantics != _defaults()["semantics"] and "impl" not in (
        options.candidate,
        *oracles,
    ):
        raise InputError(f"--semantics {options.semantics}: only impl has a choice. Drop it.")
    _check_outputs(options)
    if not select_device(options.device):
        message = f"MLX has no {options.device} device here"
        if options.require_device:
            raise CannotRunError(f"{message}. Run on a machine that has one, or use --device cpu.")
        print(f"parity: not run: {message}", file=sys.stderr)
        _write_not_run(options, command, message)
        return EXIT_CODES["nothing compared"]

    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(make_workers(options))
        if options.model:
            own = _user_target(options)
            targets: Iterable[Target] = [own]
            total = len(own.programs)
        else:
            dtypes = (options.dtype,) if options.dtype else DTYPES
            names = suite.selected(options.case or (), dtypes)
            if not names:
                raise InputError(
                    f"--case {' '.join(options.case or ())}: no case of the suite matches. "
                    f"Cases look like {suite.case_names()[0]}."
                )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-")))
            repeat = _repeat(options, *_REPEATED)
            targets = suite.targets(folder, names, options.seed, repeat)
            total = len(names)
        on_case = stack.enter_context(_progress(total * len(oracles)))
        opened = RunnerOptions(options.semantics, workers)
        result = run(targets, options.candidate, oracles, rules, options.fail_fast, on_case, opened)
    value = to_json(result, command, options.seed)
    _report(value, options)
    return exit_code(value)


def _user_target(options: argparse.Namespace) -> "Target":
    from parity import program, suite
    from parity.run import Target
    from qwen35.config import parse_config
    from qwen35.headers import open_checkpoint
    from qwen35.load import plan_of, stored_dtype

    checkpoint = open_checkpoint(model_folder(options.model))
    config = parse_config(checkpoint.config, checkpoint.path)
    plan = plan_of(checkpoint, PRESETS[options.semantics])
    if options.program:
        given = program.load(options.program)
        given.check_vocabulary(config.vocab_size)
        programs = {Path(options.program).stem: given}
    else:
        programs = suite.default_programs(config.vocab_size, options.seed)
    return Target(
        Path(options.model).name or options.model,
        checkpoint,
        plan.generation,
        options.dtype or stored_dtype(checkpoint),
        programs,
        _repeat(options, "model", "dtype", "program", *_REPEATED),
    )


def select_device(name: str) -> bool:
    """Make `name` MLX's default device; False where there is none.

    Asked of a process of its own first: MLX can abort where it finds no device.
    """
    import mlx.core as mx

    if name == "cpu":
        mx.set_default_device(mx.cpu)
        return True
    probe = "import mlx.core as mx; mx.set_default_device(mx.gpu); mx.eval(mx.ones(2) + 1)"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        return False
    mx.set_default_device(mx.gpu)
    return True


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of `total` judgements on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _repeat(options: argparse.Namespace, *names: str) -> str:
    """Return `parity run` with those of the options that were given."""
    words, defaults = ["parity", "run"], _defaults()
    for name in names:
        value = getattr(options, name)
        if value is not None and value != defaults.get(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words).replace("{", "{{").replace("}", "}}")


def _defaults() -> dict[str, Any]:
    commands = argparse.ArgumentParser().add_subparsers()
    add(commands)
    return vars(commands.choices["run"].parse_args([]))


def _outputs(options: argparse.Namespace) -> dict[str, Path | None]:
    kinds = ("json", "html", "junit", "markdown")
    return {kind: Path(name) if (name := getattr(options, kind)) else None for kind in kinds}


def _check_outputs(options: argparse.Namespace) -> None:
    """Fail before the work is done, not after it, where a report cannot be written."""
    given = [path.absolute() for path in _outputs(options).values() if path is not None]
    if len(set(given)) != len(given):
        raise InputError("two reports have one path. Name a file for each.")
    for kind, path in _outputs(options).items():
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise InputError(
                f"--{kind} {path}: cannot be written. Name a file in an existing folder."
            )


def _report(value: dict[str, Any], options: argparse.Namespace) -> None:
    from rich.console import Console

    from parity_reports import terminal
    from parity_reports.write import write

    paths = _outputs(options)
    write(
        value,
        html=paths["html"],
        markdown=paths["markdown"],
        junit=paths["junit"],
        json=paths["json"],
    )
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        write(value, markdown=Path(summary), append=True)
    try:
        terminal.render(value, Console())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_not_run(options: argparse.Namespace, command: str, message: str) -> None:
    """Leave no older result behind for a bot to read: write that nothing was run, and why."""
    path = _outputs(options)["json"]
    if path is None or not path.parent.is_dir() or path.is_dir():
        return
    from parity.result import not_run
    from parity_reports.write import write

    write(not_run(command, message), json=path)
