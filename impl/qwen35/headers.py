"""Checkpoint facts from headers alone: names, dtypes, shapes and where the bytes lie.

Reads no tensor bytes and imports no framework. A safetensors file is 8 bytes of header length
(little-endian), a JSON header, and the tensors' bytes without gaps.
"""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from qwen35.errors import CheckpointError

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""safetensors dtype -> bits an element."""
FLOATS = ("F32", "F16", "BF16")
HEADER_LIMIT = 100_000_000
"""Bytes a header may have, the safetensors library's own limit; also for the JSON files."""
INDEX = "model.safetensors.index.json"
_LOADED = "model*.safetensors"  # what mlx-lm loads
_AGAIN = "The file is damaged or incomplete: fetch or export it again"
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 120, 8


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
            "sizes": {file.name: _stat(file).st_size for file in self.files},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder's config and headers.

    Raises CheckpointError where something is absent, damaged or ambiguous: mlx-lm loads every
    model*.safetensors, transformers what the index names, so the two must be the same tensors.
    """
    folder = Path(path)
    # os.path answers False where Path raises: a name too long, a folder that may not be searched.
    if not os.path.isdir(folder):
        raise CheckpointError(folder, "is no folder", "Give a checkpoint's folder")
    config = _json_object(folder / "config.json", "Give a folder with a config.json")
    # lexists: a dangling link to an index is a damaged checkpoint, not one without an index.
    named = _read_index(folder / INDEX) if os.path.lexists(folder / INDEX) else None
    tensors: dict[str, TensorHeader] = {}
    for file in _weight_files(folder):
        for name, header in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    file,
                    f"tensor {_short(name)} is also in {tensors[name].file.name}",
                    "Remove one of the two files",
                )
            tensors[name] = header
    if named is not None:
        _compare_index(folder / INDEX, named, tensors)
    return Checkpoint(folder, config, tensors)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob(_LOADED))
    if not files:
        raise CheckpointError(
            folder, f"has no {_LOADED}", "Give a checkpoint in safetensors format"
        )
    return files


def _read_index(index: Path) -> dict[str, str]:
    named = _json_object(index, _AGAIN).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise CheckpointError(index, "has no weight_map of file names", _AGAIN)
    for name, shard in named.items():
        problem = None
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            problem = f"places tensor {_short(name)} in {_short(shard)}, outside the folder"
        elif not os.path.exists(index.parent / shard):
            problem = f"names {_short(shard)}, which is not there"
        if problem:
            raise CheckpointError(index, problem, _AGAIN)
        if not Path(shard).match(_LOADED):
            raise CheckpointError(
                index,
                f"names {_short(shard)}: transformers would load it, mlx-lm only {_LOADED}",
                "Rename the file, and write the index again",
            )
    return named


def _compare_index(index: Path, named: dict[str, str], tensors: dict[str, TensorHeader]) -> None:
    for name, shard in named.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                index.parent / shard,
                f"lacks tensor {_short(name)}, which the index places there",
                _AGAIN,
            )
    if extra := sorted(set(tensors) - set(named)):
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
        with open(file, "rb", opener=_open) as stream:
            size = _size(file, os.fstat(stream.fileno()))
            length = int.from_bytes(stream.read(8), "little")
            if size < 8:
                raise CheckpointError(
                    file, f"has {size} bytes, 8 are due for the header's length alone", _AGAIN
                )
            if length > size - 8:
                raise CheckpointError(
                    file,
                    f"the header is to have {length} bytes, the file has {size - 8} for it",
                    _AGAIN,
                )
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    file, f"the header has {length} bytes, at most {HEADER_LIMIT} are due", _AGAIN
                )
            text = stream.read(length)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error, "Check the path and permissions") from None
    entries = _parse(file, text, "the header")
    notes = entries.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise CheckpointError(file, "the header's __metadata__ is no object of strings", _AGAIN)
    headers = [_tensor(file, name, entry, 8 + length) for name, entry in entries.items()]
    _check_layout(file, headers, 8 + length, size)
    return {header.name: header for header in headers}


def _open(file: str, flags: int) -> int:
    # A pipe would otherwise be waited for, before fstat can tell that it is one.
    return os.open(file, flags | getattr(os, "O_NONBLOCK", 0))


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise _unreadable(file, error, "Put the file back, or open the checkpoint again") from None


def _size(file: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, "is no regular file", "Give a file in its place")
    return status.st_size


def _unreadable(file: Path, error: Exception, remedy: str) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(file, f"cannot be read ({reason})", remedy)


def _parse(file: Path, text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise CheckpointError(file, f"{what} has the key {_short(key)} twice", _AGAIN)
            value[key] = item
        return value

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise CheckpointError(file, f"{what} is no JSON ({reason})", _AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(file, f"{what} is no JSON object", _AGAIN)
    return value


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorHeader:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(file, f"tensor {_short(name)} {problem}", _AGAIN)

    if not isinstance(entry, dict):
        raise fail("is no JSON object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise fail(f"has the unknown dtype {_short(dtype)}")
    if not _whole_numbers(shape) or len(shape) > 64 or math.prod(shape) >= 2**63:
        raise fail(f"has the shape {_short(shape)}, a list of sizes is due")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"has the offsets {_short(offsets)}, a start and an end after it are due")
    due, rest = divmod(math.prod(shape) * BITS[dtype], 8)
    if rest:
        raise fail(f"ends within a byte: {dtype} {shape}")
    if offsets[1] - offsets[0] != due:
        raise fail(f"takes {offsets[1] - offsets[0]} bytes, {due} are due for {dtype} {shape}")
    return TensorHeader(name, dtype, tuple(shape), file, data + offsets[0], data + offsets[1])


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    # No tensor reaches 2^63 in any measure; a longer number only makes the sums slow.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(file: Path, headers: list[TensorHeader], data: int, size: int) -> None:
    at = data
    for header in sorted(headers, key=lambda h: (h.start, h.end)):
        if header.end > size:
            raise CheckpointError(
                file,
                f"tensor {_short(header.name)} ends at byte {header.end}, the file has {size}",
                "The file is truncated: fetch or export it again",
            )
        if header.start != at:
            what = (
                "overlaps the tensor before it" if header.start < at else "leaves a gap before it"
            )
            raise CheckpointError(file, f"tensor {_short(header.name)} {what}", _AGAIN)
        at = header.end
    if at != size:
        raise CheckpointError(file, f"has {size - at} bytes after its last tensor", _AGAIN)


def _json_object(file: Path, remedy: str) -> dict[str, Any]:
    try:
        with open(file, "rb", opener=_open) as stream:
            size = _size(file, os.fstat(stream.fileno()))
            if size > HEADER_LIMIT:
                raise CheckpointError(file, f"has {size} bytes, too many for JSON", remedy)
            text = stream.read(size)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error, remedy) from None
    return _parse(file, text, "the file")


def _short(value: Any) -> str:
    # A hostile header may hold a name of megabytes or a list too deep for repr.
    return _SHORT.repr(value)


def _some(names: list[str]) -> str:
    shown = ", ".join(_short(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
