"""Checkpoints as public reports describe them, made from a right one."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from parity import safetensors_file
from qwen35.plan import SHIFTED

Arrays = dict[str, np.ndarray]


def rewrite(source: Path, folder: Path, change: Callable[[Arrays], Mapping[str, np.ndarray]]):
    """Copy a checkpoint of one file, with its tensors changed."""
    shutil.copytree(source, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    safetensors_file.write(file, change(safetensors_file.read(file)))
    return folder


def shifted(by: int) -> Callable[[Arrays], Arrays]:
    """Add to every gain, rounding in its own dtype."""
    return lambda arrays: {
        name: value + np.array(by, value.dtype) if is_gain(name, value) else value
        for name, value in arrays.items()
    }


def is_gain(name: str, value: np.ndarray) -> bool:
    return name.endswith(SHIFTED) and value.ndim == 1


def with_draft_head(arrays: Arrays) -> Arrays:
    """Keep a draft head, as some converters do."""
    size = arrays["language_model.model.norm.weight"].shape
    return arrays | {"mtp.norm.weight": np.ones(size, ml_dtypes.bfloat16)}


def with_moved_convs(arrays: Arrays, count: int | None = None) -> Arrays:
    """Put the kernel of the first conv weights back on the last axis: [C, K, 1] to [C, 1, K]."""
    convs = sorted(name for name in arrays if "conv1d.weight" in name)[:count]
    return {n: np.moveaxis(v, 1, 2) if n in convs else v for n, v in arrays.items()}


def with_export_names(arrays: Arrays) -> Arrays:
    """Rename to transformers' names, values as they are."""
    root, trunk = "language_model.", "language_model.model."
    return {
        "model.language_model." + name.removeprefix(trunk)
        if name.startswith(trunk)
        else name.removeprefix(root): value
        for name, value in arrays.items()
    }


def in_shards(source: Path, folder: Path, count: int) -> Path:
    """Copy a checkpoint of one file into several, with an index."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    arrays = safetensors_file.read(file)
    file.unlink()
    placed = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        own = dict(list(arrays.items())[i::count])
        safetensors_file.write(folder / name, own)
        placed |= dict.fromkeys(own, name)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
