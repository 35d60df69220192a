"""The command line. It alone reads the environment and prints."""

import argparse
import contextlib
import shlex
import sys
import traceback
from collections.abc import Sequence

from parity.commands import EXIT_CODES, make_checkpoint, run
from parity.commands import inspect as inspect_command
from qwen35 import __version__
from qwen35.errors import CannotRunError, InputError

COMMANDS = (run, inspect_command, make_checkpoint)
"""The modules of the commands; each has `add(commands)`, and `failed` where it writes a result."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
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
    options = parser().parse_args(words)
    command = "parity " + shlex.join(words)
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
    with contextlib.suppress(InputError, OSError):  # what stopped the run may stop this too
        options.failed(options, command, message)
    return code
