"""The options of commands that may start workers, and the workers they describe."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35.errors import InputError

if TYPE_CHECKING:
    from parity.runners.worker import Workers


def add_worker_options(command: argparse.ArgumentParser) -> None:
    """Add --cache and --worker-timeout."""
    command.add_argument(
        "--cache",
        metavar="DIR",
        help="keeps the environments of mlx-lm==VERSION (default: $QWEN35_PARITY_CACHE, or "
        "qwen35-parity in $XDG_CACHE_HOME or ~/.cache)",
    )
    command.add_argument(
        "--worker-timeout",
        metavar="SECONDS",
        type=float,
        help="end a worker that takes longer to answer (default: 3600)",
    )


def make_workers(options: argparse.Namespace) -> "Workers":
    """Return the workers of a command, none of them started; `with` ends them."""
    from parity.runners.worker import DEFAULT_TIMEOUT, Workers

    timeout = DEFAULT_TIMEOUT if options.worker_timeout is None else options.worker_timeout
    if not timeout > 0:
        raise InputError(f"--worker-timeout {timeout:g}: is no time. Give seconds above 0.")

    def say(message: str) -> None:
        print(f"parity: {message}", file=sys.stderr)

    return Workers(cache_folder(options.cache), timeout, options.device, say)


def cache_folder(given: str | None) -> Path:
    """Return the folder that keeps what is costly to make."""
    if chosen := given or os.environ.get("QWEN35_PARITY_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qwen35-parity"
