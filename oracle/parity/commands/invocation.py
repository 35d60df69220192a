"""How the command line was called, so that a repeat command works as it is printed."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command_line(words: Sequence[str]) -> str:
    """Return the command that calls parity with these words, quoted for a shell.

    It starts with `parity`, or with the path that was typed: nox's environment is not on PATH.
    """
    typed = sys.argv[0]
    on_path = Path(typed).name != "parity" or shutil.which("parity") == typed
    return shlex.join(["parity" if on_path else typed, *words])
