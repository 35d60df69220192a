"""safetensors files of NumPy arrays, bfloat16 as it is; a header can be written before its bytes.

Needs NumPy and ml_dtypes alone, so that a worker in an old environment can use it too.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from qwen35.headers import BITS, read_header

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""safetensors dtype -> the NumPy dtype that is read and written."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor's name, safetensors dtype and shape."""


def size(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor of this safetensors dtype."""
    return math.prod(shape) * BITS[dtype] // 8


def header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file's first bytes: the tensors' bytes follow in the order of `entries`."""
    value: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in entries:
        end = at + size(dtype, shape)
        value[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(value, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as the library pads it, so that the bytes are aligned
    return len(text).to_bytes(8, "little") + text


def write(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of the dtypes in DTYPES, whatever their strides."""
    entries = [(name, _NAMES[value.dtype], value.shape) for name, value in arrays.items()]
    with open(file, "wb") as stream:
        stream.write(header(entries))
        for value in arrays.values():
            stream.write(value.tobytes())


def read(file: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file. Raises CheckpointError, or ValueError for an unread dtype."""
    arrays = {}
    headers = read_header(file)
    with open(file, "rb") as stream:
        for name, entry in headers.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{file}: tensor {name!r} is {entry.dtype}, which is not read")
            stream.seek(entry.start)
            data = np.fromfile(stream, np.uint8, entry.end - entry.start)
            arrays[name] = data.view(DTYPES[entry.dtype]).reshape(entry.shape)
    return arrays
