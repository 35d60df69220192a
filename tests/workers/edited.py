"""Edited copies of the installed mlx-lm, for workers."""

import shutil
from pathlib import Path

import mlx_lm

SOURCE = Path(mlx_lm.__file__).parent


def edited_copy(folder, file=None, old=None, new=None):
    """Copy the package below `folder`, with one text of one file replaced, and return `folder`."""
    shutil.copytree(SOURCE, folder / "mlx_lm", ignore=shutil.ignore_patterns("__pycache__"))
    if file is not None:
        path = folder / "mlx_lm" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
        path.write_text(text.replace(old, new))
    return folder
