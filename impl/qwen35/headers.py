"""Checkpoint facts from headers alone: names, dtypes, shapes and where the bytes lie.

Reads no tensor bytes and imports no framework. A safetensors file is 8 bytes of header length
(little-endian), a JSON header, and the tensors' bytes without gaps.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35.errors import CheckpointError

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""safetensors dtype -> bits an element."""
FLOATS = ("F32", "F16", "BF16")
HEADER_LIMIT = 100_000_000
"""Bytes a header may have; the safetensors library's own limit."""
INDEX = "model.safetensors.index.json"
_AGAIN = "The file is damaged or incomplete: fetch or export it again"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: its dtype in safetensors' spelling, and its bytes [start, end) in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: its config.json and the headers of all its tensors."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, sorted."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def digest(self) -> str:
        """Return a sha256 over the config, every header, and the files' sizes (not their bytes)."""
        facts = {
            "config": self.config,
            "tensors": [
                [t.name, t.dtype, t.shape, t.file.name, t.start, t.end]
                for t in sorted(self.tensors.values(), key=lambda t: t.name)
            ],
            "sizes": {file.name: file.stat().st_size for file in self.files},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder's config and headers.

    Raises CheckpointError where something is absent, damaged or ambiguous: mlx-lm loads every
    model*.safetensors, transformers what the index names, so the two must be the same tensors.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(folder, "is no folder", "Give a checkpoint's folder")
    config = _json_object(folder / "config.json", "Give a folder with a config.json")
    tensors: dict[str, TensorHeader] = {}
    for file in _weight_files(folder):
        for name, header in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    file,
                    f"tensor {name!r} is also in {tensors[name].file.name}",
                    "Remove one of the two files",
                )
            tensors[name] = header
    if (folder / INDEX).exists():
        _check_index(folder / INDEX, tensors)
    return Checkpoint(folder, config, tensors)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            folder, "has no model*.safetensors", "Give a checkpoint in safetensors format"
        )
    return files


def _check_index(index: Path, tensors: dict[str, TensorHeader]) -> None:
    weight_map = _json_object(index, _AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(index, "has no weight_map of file names", _AGAIN)
    for name, shard in weight_map.items():
        if Path(shard).name != shard:
            raise CheckpointError(
                index, f"tensor {name!r} is in {shard!r}, outside the folder", _AGAIN
            )
        if not (index.parent / shard).exists():
            raise CheckpointError(index, f"names {shard!r}, which is not there", _AGAIN)
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                index.parent / shard, f"lacks tensor {name!r}, which the index places there", _AGAIN
            )
    if extra := sorted(set(tensors) - set(weight_map)):
        raise CheckpointError(
            index,
            f"does not name {_some(extra)}, found in {tensors[extra[0]].file.name}: mlx-lm would "
            "load them and transformers would not",
            "Remove the file that does not belong, or write the index again",
        )


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Read one safetensors header: name -> facts, in the header's order.

    Allocates no more than the header, which may not exceed HEADER_LIMIT or the file. Raises
    CheckpointError for whatever does not describe this very file.
    """
    try:
        with open(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(file, "is no regular file", "Give a safetensors file")
            size = status.st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    file,
                    f"the header is to have {length if size >= 8 else 'at least 0'} bytes, the "
                    f"file has {max(size - 8, 0)} after its length field",
                    _AGAIN,
                )
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    file, f"the header has {length} bytes, more than {HEADER_LIMIT}", _AGAIN
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            file, f"cannot be read ({error.strerror or error})", "Check the path and permissions"
        ) from None
    entries = _parse(file, text)
    entries.pop("__metadata__", None)
    headers = [_tensor(file, name, entry, 8 + length) for name, entry in entries.items()]
    _check_layout(file, headers, 8 + length, size)
    return {header.name: header for header in headers}


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise CheckpointError(file, f"the header has the key {key!r} twice", _AGAIN)
            value[key] = item
        return value

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise CheckpointError(file, f"the header is no JSON ({reason})", _AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(file, "the header is no JSON object", _AGAIN)
    return value


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorHeader:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(file, f"tensor {name!r} {problem}", _AGAIN)

    if not isinstance(entry, dict):
        raise fail("is no JSON object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise fail(f"has the unknown dtype {dtype!r}")
    if not _whole_numbers(shape) or len(shape) > 64:
        raise fail(f"has the shape {str(shape)[:80]}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"has the offsets {str(offsets)[:80]}")
    due = -(-math.prod(shape) * BITS[dtype] // 8)
    if offsets[1] - offsets[0] != due:
        raise fail(
            f"takes {offsets[1] - offsets[0]} bytes, {due} are due for {dtype} {list(shape)}"
        )
    return TensorHeader(name, dtype, tuple(shape), file, data + offsets[0], data + offsets[1])


def _whole_numbers(value: Any) -> bool:
    # No tensor reaches 2^63 in any measure; a longer number only makes the sums slow.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(file: Path, headers: list[TensorHeader], data: int, size: int) -> None:
    at = data
    for header in sorted(headers, key=lambda h: (h.start, h.end)):
        if header.end > size:
            raise CheckpointError(
                file,
                f"tensor {header.name!r} ends at byte {header.end}, the file has {size}",
                "The file is truncated: fetch or export it again",
            )
        if header.start != at:
            what = (
                "overlaps the tensor before it" if header.start < at else "leaves a gap before it"
            )
            raise CheckpointError(file, f"tensor {header.name!r} {what}", _AGAIN)
        at = header.end
    if at != size:
        raise CheckpointError(file, f"has {size - at} bytes after its last tensor", _AGAIN)


def _json_object(file: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror or error})", remedy) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is no JSON ({str(error)[:120]})", _AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(file, "is no JSON object", _AGAIN)
    return value


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
