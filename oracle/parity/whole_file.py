"""A text file that is replaced whole or not at all; links are written through."""

import contextlib
import os
import secrets
from pathlib import Path

from qwen35.errors import InputError


def replace(path: Path, text: str) -> None:
    """Give the file this text; a pipe or a device is written to. Raises InputError."""
    if _is_stream(path):
        append(path, text)
        return
    real = Path(os.path.realpath(path))
    temporary = _beside(real)
    try:
        # Not tempfile: its files are private, and a report is read by others.
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, real)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def append(path: Path, text: str) -> None:
    """Add the text to the end of the file. Raises InputError."""
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def check_writable(path: Path) -> None:
    """Raise InputError where `replace` would, as far as can be known before; change nothing."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # raises for a name that is too long
        if _is_stream(path):
            if not os.access(path, os.W_OK):  # opening it would end its reader
                raise PermissionError(0, "Permission denied")
            return
        if os.path.isdir(path):
            raise IsADirectoryError(0, "Is a directory")
        temporary = _beside(Path(os.path.realpath(path)))
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _is_stream(path: Path) -> bool:
    """Whether it is there and can be neither replaced nor is a folder: /dev/stdout, a pipe."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _beside(real: Path) -> Path:
    return real.parent / f".parity-{secrets.token_hex(4)}.tmp"


def _cannot_write(path: Path, error: OSError) -> InputError:
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        return InputError(
            f"{path}: cannot be written, there is no folder {folder}. Make the folder, or "
            "name a file in an existing one."
        )
    return InputError(
        f"{path}: cannot be written ({error.strerror}). Name a file in a folder that you may "
        "write to."
    )
