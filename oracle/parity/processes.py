"""Ending child processes with all they started, and what they said last."""

import contextlib
import os
import signal
import subprocess
from typing import IO

_LINES, _BYTES = 6, 2000


def kill_group(process: subprocess.Popen) -> None:
    """Kill a child that leads a session of its own, with every process of its group; reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(code: int) -> str:
    """Say how a process ended, from its return code."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def tail(stream: IO[bytes]) -> str:
    """Return the last lines of a file that a child wrote to, indented; empty if there are none."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, end - _BYTES))
    lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    shown = "".join(f"\n    {line.rstrip()[:300]}" for line in lines[-_LINES:])
    return f"\n  It said last:{shown}" if shown else ""
