"""The command line. It alone reads the environment and prints."""

import argparse
import contextlib
import io
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from parity.commands import EXIT_CODES, make_checkpoint, run
from parity.commands import inspect as inspect_command
from parity.commands.invocation import command_line
from parity.commands.outputs import is_replaceable
from qwen35 import __version__
from qwen35.errors import CannotRunError, InputError

COMMANDS = (run, inspect_command, make_checkpoint)
"""The modules of the commands; each has `add(commands)`, and `failed` where it writes a result."""


class _UsageError(SystemExit):
    """argparse's complaint, and its exit."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(EXIT_CODES["usage"])
        self.parser, self.message = parser, message


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(self, message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = _Parser(
        prog="parity",
        description="Does this runtime compute Qwen3.5 exactly as the oracle does?",
        epilog="exit codes: 0 holds, 1 differs, 2 usage or bad input, 3 could not run, "
        "5 nothing was compared",
    )
    top.add_argument("--version", action="version", version=f"qwen35-parity {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = command_line(words)
    try:
        options = parser().parse_args(words)
    except _UsageError as error:
        error.parser.print_usage(sys.stderr)
        print(f"{error.parser.prog}: error: {error.message}", file=sys.stderr)
        readable = _readable_options(words)
        # Only an older result may be overwritten: which inputs were meant is uncertain.
        with contextlib.suppress(OSError):
            if readable is not None and is_replaceable(getattr(readable, "json", None)):
                _failed(readable, command, error.message)
        raise
    try:
        return options.function(options, command)
    except InputError as error:
        message, code = str(error), EXIT_CODES["usage"]
    except CannotRunError as error:
        message, code = f"could not run: {error}", EXIT_CODES["cannot run"]
    except KeyboardInterrupt:
        message, code = "interrupted", EXIT_CODES["cannot run"]
    except OSError as error:  # a name too long for a path, a disk that is full
        message, code = f"{error}. Check the path and the disk.", EXIT_CODES["usage"]
    except Exception as error:  # a fault here must not read as `differs`, which is exit code 1
        traceback.print_exc()
        message = f"could not run: a fault of parity itself ({type(error).__name__}: {error})"
        code = EXIT_CODES["cannot run"]
    print(f"parity: {message}", file=sys.stderr)
    _failed(options, command, message)
    return code


def _failed(options: argparse.Namespace, command: str, message: str) -> None:
    with contextlib.suppress(InputError, OSError):  # what stopped the run may stop this too
        options.failed(options, command, message)


def _readable_options(words: Sequence[str]) -> argparse.Namespace | None:
    """Return the options of a command that could not be parsed, as far as they can be read."""
    commands = argparse.ArgumentParser().add_subparsers(parser_class=_Parser)
    for module in COMMANDS:
        module.add(commands)
    at = next((i for i, word in enumerate(words) if word in commands.choices), None)
    if at is None:
        return None
    command = commands.choices[words[at]]
    rest = [word for word in words[at + 1 :] if word not in ("-h", "--help")]
    for action in command._actions:
        action.type = action.choices = None
        action.required = False
        action.nargs = "?" if action.nargs is None else action.nargs
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --hel is --help too
            return command.parse_known_args(rest)[0]
    except SystemExit:
        return None
