"""The files a command writes: known to be writable before the work is done, and never an input."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from parity.whole_file import check_writable
from qwen35.errors import InputError


def check_outputs(outputs: Mapping[str, str], inputs: Iterable[str | None]) -> None:
    """Raise InputError for a path that cannot be written, is shared, or is or may be an input.

    `outputs` are by option. `inputs` are files and folders; nothing is to be written in the latter.
    """
    read = [os.path.realpath(name) for name in inputs if name]
    taken: dict[str, str] = {}
    for option, name in outputs.items():
        real = os.path.realpath(name)
        if other := taken.get(real):
            raise InputError(f"{other} and {option} have one path. Name a file for each.")
        taken[real] = option
        if any(_is_part(real, of) for of in read):
            raise InputError(
                f"{option} {name}: is an input, or in a folder that is one, and would be lost. "
                "Name another file."
            )
        try:
            check_writable(Path(name))
        except InputError as error:
            raise InputError(f"{option} {error}") from None


def is_replaceable(name: str | None) -> bool:
    """Return whether a path for a result is free, a stream, empty, or holds an older result."""
    if not name or not os.path.isfile(name):
        return bool(name)
    with open(name, "rb") as file:
        head = file.read(200)
    return not head or b'"verdict"' in head


def _is_part(real: str, of: str) -> bool:
    if real == of or real.startswith(os.path.join(of, "")):
        return True
    # The hub's cache keeps a checkpoint's files elsewhere and links to them.
    names = os.listdir(of) if os.path.isdir(of) else ()
    return any(os.path.realpath(os.path.join(of, name)) == real for name in names)
