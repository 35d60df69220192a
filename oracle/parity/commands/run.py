"""`parity run`: programs on a candidate and its oracles, judged tensor by tensor."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.commands import EXIT_CODES
from parity.commands.invocation import command_line
from parity.commands.models import is_hub_id, model_folder
from parity.commands.outputs import check_outputs
from parity.commands.worker_options import add_worker_options, make_workers
from qwen35.errors import CannotRunError, InputError
from qwen35.semantics import PRESETS

if TYPE_CHECKING:
    from parity.run import Target

DTYPES = ("float32", "float16", "bfloat16")
_REPORTS = ("json", "html", "junit", "markdown")
_SUMMARY = "$GITHUB_STEP_SUMMARY"
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
        help="runner to judge by; repeatable (default: mlx-lm and transformers; for a program that "
        "does more than append, append-only too); mlx-lm==VERSION runs in an environment of its "
        "own, mlx-lm@PATH a checkout or edited copy, append-only the candidate on a row's tokens "
        "alone",
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
    from parity.result import to_json
    from parity.run import run
    from parity.runners.append_only import APPEND_ONLY
    from parity.runners.base import RunnerOptions
    from parity.runners.registry import abilities

    for name in ("model", "program", "policy", "json", "html", "junit", "markdown"):
        if getattr(options, name) == "":  # an unset variable must not choose the suite
            raise InputError(f"--{name}: is empty. Name a path, or leave the option out.")
    check_outputs(_outputs(options), _inputs(options))
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
            if not options.oracle and not all(p.is_plain for p in own.programs.values()):
                oracles.append(APPEND_ONLY)
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
    return _report(value, options)


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
    """Return the command `run` with those of the options that were given."""
    words, defaults = ["run"], _defaults()
    for name in names:
        value = getattr(options, name)
        if value is not None and value != defaults.get(name):
            words += [f"--{name}", str(value)]
    return command_line(words).replace("{", "{{").replace("}", "}}")


def _defaults() -> dict[str, Any]:
    commands = argparse.ArgumentParser().add_subparsers()
    add(commands)
    return vars(commands.choices["run"].parse_args([]))


def _outputs(options: argparse.Namespace) -> dict[str, str]:
    given = {f"--{kind}": getattr(options, kind) for kind in _REPORTS}
    given[_SUMMARY] = os.environ.get(_SUMMARY[1:])
    return {option: name for option, name in given.items() if name}


def _inputs(options: argparse.Namespace) -> list[str | None]:
    model = options.model if options.model and not is_hub_id(options.model) else None
    return [model, options.program, options.policy]


def _report(value: dict[str, Any], options: argparse.Namespace) -> int:
    """Write and print the result and return the exit code.

    The JSON comes first, and nothing that fails afterwards changes what it says.
    """
    from parity.result import exit_code

    failures = _write_reports(value, options)
    if (failure := _print(value)) is not None:
        failures.append(failure)
    for failure in failures:
        print(f"parity: {failure} The verdict is {value['verdict']}.", file=sys.stderr)
    return EXIT_CODES["cannot run"] if failures else exit_code(value)


def _write_reports(value: dict[str, Any], options: argparse.Namespace) -> list[str]:
    from parity_reports.write import write

    failures = []
    for option, name in _outputs(options).items():
        path, summary = Path(name), option == _SUMMARY
        kind = "markdown" if summary else option.removeprefix("--")
        try:
            write(value, append=summary, **{kind: path})
        except InputError as error:
            failures.append(f"{option} {error}")
            if option == "--json" and path.is_file():  # an older verdict is not this run's
                with contextlib.suppress(OSError):
                    Path(os.path.realpath(path)).unlink()
        options.failed = lambda *ignored: None  # a result is not replaced by `not-run`
    return failures


def _print(value: dict[str, Any]) -> str | None:
    """Print the report; return what is wrong where standard output cannot take it."""
    from rich.console import Console

    from parity_reports import terminal

    class Pipe(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which says `differs` here
            raise BrokenPipeError

    try:
        terminal.render(value, Pipe())
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # there the reader, `head` say, has seen enough
            return f"standard output: cannot be written ({error.strerror}). Check the disk."
    return None


def _write_not_run(options: argparse.Namespace, command: str, message: str) -> None:
    """Leave no older result behind for a bot to read: write that nothing was run, and why.

    Raises InputError where --json is an input or cannot be written.
    """
    if not options.json:
        return
    check_outputs({"--json": options.json}, _inputs(options))
    from parity.result import not_run
    from parity_reports.write import write

    write(not_run(command, message), json=Path(options.json))
