"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qwen35.errors import InputError


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a path to be made into a folder; it becomes `folder` if nothing is raised.

    Raises InputError where `folder` exists or its place cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder}: already exists. Choose another folder, or remove this one.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made ({error.strerror or error}). Choose another folder."
        ) from None
    try:
        yield place / folder.name
        os.rename(place / folder.name, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
