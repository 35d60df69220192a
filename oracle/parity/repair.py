"""A corrected copy of a checkpoint: what a right conversion would have written.

The copy has mlx-lm's names, conv weights [C, K, 1], gains γ and no draft head, because that is the
one form which every published rule reads the same way. It is written a few megabytes at a time,
inspected, and only then given its name.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from parity.evidence import kind_of
from parity.inspection import Inspection, inspect
from parity.new_folder import new_folder
from parity.safetensors_file import DTYPES, header
from parity.shown import shown
from qwen35.errors import CannotRunError, CheckpointError, InputError
from qwen35.headers import INDEX, TensorHeader, open_checkpoint
from qwen35.plan import Entry

_CHUNK = 1 << 22
_STEPS = {"γ−1": 1, "γ": 0, "γ+1": -1}


@dataclass(frozen=True)
class Repaired:
    """What was written, and what was done to the gains and dropped."""

    folder: Path
    because: str
    gains: int
    added: int
    moved: int
    renamed: int
    dropped: tuple[tuple[str, str], ...]
    left: tuple[str, ...]
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "folder": str(self.folder),
            "because": self.because,
            "gains": self.gains,
            "added": self.added,
            "moved": self.moved,
            "renamed": self.renamed,
            "dropped": [list(pair) for pair in self.dropped],
            "left": list(self.left),
            "sentence": self.sentence,
        }

    def __str__(self) -> str:
        done = []
        if self.added:
            done.append(f"{self.added:+d} on {self.gains} gains ({self.because})")
        if self.moved:
            done.append(f"{self.moved} conv weights moved to [C, K, 1]")
        if self.renamed:
            done.append(f"{self.renamed} names changed to mlx-lm's")
        for why in dict.fromkeys(why for _, why in self.dropped):
            names = [name for name, reason in self.dropped if reason == why]
            done.append(f"{len(names)} tensors dropped ({why}; {shown(names[0])} first)")
        lines = [f"\n{self.folder}: repaired: {'; '.join(done)}.", self.sentence]
        if self.added < 0:
            lines.append(
                "Note: adding 1 had rounded the gains; that rounding stays. Converting the "
                "original again is exact."
            )
        if self.left:
            lines.append(f"Not copied: {', '.join(shown(name) for name in self.left)}.")
        return "\n".join(lines)


def repair(found: Inspection, out: Path) -> Repaired:
    """Write a corrected copy to `out`, which must not exist; the input is only read.

    Raises InputError where nothing is wrong, or what is wrong is not certain, or `out` is taken.
    """
    source = found.checkpoint.path
    if out.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{out}: lies in the checkpoint itself. Choose a folder outside {source}.")
    step = _step(found)
    entries, dropped = _entries(found)
    size = sum(t.end - t.start for t in found.checkpoint.tensors.values())
    try:
        with new_folder(out) as new:
            new.mkdir()
            if size > (free := shutil.disk_usage(new).free):
                raise CannotRunError(
                    f"{out}: {size:,} bytes are to be written, the disk has {free:,} free. Choose "
                    "another disk."
                )
            changed = _write(found, entries, step, new)
            left = _copy_others(found, new)
            after = _verify(found, len(entries), new, out)
    except OSError as error:
        raise CannotRunError(
            f"{out}: cannot be written ({error.strerror or error}). Nothing was left there."
        ) from None
    return Repaired(
        out,
        f"stored as {found.evidence.says}",
        changed if step else 0,
        step,
        sum(e.move_conv for e in entries),
        sum(e.source != e.target for e in entries),
        tuple(dropped),
        left,
        after.sentence,
    )


def _step(found: Inspection) -> int:
    """Return what to add to each gain; refuse where it is not certain."""
    where = found.checkpoint.path
    # mlx-lm refuses a tied model that stores its head as well; the copy goes without.
    head = any(why.startswith("the head") for _, why in found.plan.dropped)
    if found.holds and not head:
        raise InputError(f"{where}: nothing to repair. {found.sentence}")
    if found.evidence.says not in _STEPS:
        raise InputError(
            f"{where}: not repaired, as the gains' values decide and they are "
            f"{found.evidence.says}: {found.evidence.because}. Convert the original again."
        )
    for entry in found.plan.entries:
        shape = found.facts.shapes[entry.source]
        if "conv1d.weight" in entry.target and (len(shape) != 3 or 1 not in shape[1:]):
            raise InputError(
                f"{where}: not repaired, as {shown(entry.source)} is {list(shape)}, neither "
                "[C, 1, K] nor [C, K, 1]. Convert the original again."
            )
    return _STEPS[found.evidence.says]


def _entries(found: Inspection) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the tensors to write, vision included as it is, and those dropped."""
    vision = [name for name, why in found.plan.dropped if why == "vision"]
    dropped = [
        (name, why + ", which older loaders take for a sign of γ−1" * (why == "draft head"))
        for name, why in found.plan.dropped
        if why != "vision"
    ]
    entries = {e.source: e for e in found.plan.entries}
    entries |= {name: Entry(name, name, False, False) for name in vision}
    return [entries[name] for name in found.checkpoint.tensors if name in entries], dropped


def _write(found: Inspection, entries: list[Entry], step: int, new: Path) -> int:
    tensors = found.checkpoint.tensors
    by_file: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(tensors[entry.source].file, []).append(entry)
    placed: dict[str, str] = {}
    total = gains = 0
    for file, own in by_file.items():
        own.sort(key=lambda entry: tensors[entry.source].start)
        with open(file, "rb") as reading, open(new / file.name, "wb") as writing:
            rows = ((e.target, tensors[e.source].dtype, _shape(e, found)) for e in own)
            writing.write(header(rows, {"format": "mlx"}))
            for entry in own:
                tensor = tensors[entry.source]
                gain = len(tensor.shape) == 1 and kind_of(entry.target) is not None
                is_vision = entry.target.startswith(("vision_tower", "model.visual"))
                if gain and step and not is_vision:
                    writing.write(_shifted(reading, tensor, step))
                    gains += 1
                else:
                    writing.writelines(_chunks(reading, tensor))
                placed[entry.target] = file.name
                total += tensor.end - tensor.start
    if (found.checkpoint.path / INDEX).exists():
        value = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (new / INDEX).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return gains


def _shape(entry: Entry, found: Inspection) -> tuple[int, ...]:
    shape = found.facts.shapes[entry.source]
    # [C, 1, K] and [C, K, 1] have the same bytes.
    return (shape[0], shape[2], shape[1]) if entry.move_conv else shape


def _chunks(stream: BinaryIO, tensor: TensorHeader) -> Iterator[bytes]:
    stream.seek(tensor.start)
    left = tensor.end - tensor.start
    while left:
        data = stream.read(min(left, _CHUNK))
        if not data:
            raise CheckpointError(
                tensor.file, "became shorter while it was read", "Leave it alone, and try again"
            )
        left -= len(data)
        yield data


def _shifted(stream: BinaryIO, tensor: TensorHeader, step: int) -> bytes:
    """Return the gain with `step` added in its own dtype, as mlx-lm's conversion rounds it."""
    import numpy as np

    if tensor.dtype not in ("F16", "BF16", "F32", "F64"):
        raise InputError(
            f"{tensor.file}: not repaired, as gain {shown(tensor.name)} is {tensor.dtype}. "
            "Convert the original again."
        )
    values = np.frombuffer(b"".join(_chunks(stream, tensor)), DTYPES[tensor.dtype])
    return (values + np.array(step, values.dtype)).tobytes()


def _copy_others(found: Inspection, new: Path) -> tuple[str, ...]:
    """Copy the other files of the folder, and return what was left: folders and other weights."""
    own = {file.name for file in found.checkpoint.files} | {INDEX}
    left = []
    for path in sorted(found.checkpoint.path.iterdir()):
        if path.name in own:
            continue
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copyfile(path, new / path.name)
        else:
            left.append(path.name)
    return tuple(left)


def _verify(found: Inspection, count: int, new: Path, out: Path) -> Inspection:
    """Inspect what was written; it must be right by every rule, or nothing is kept."""
    written = open_checkpoint(new)
    after = inspect(written, found.rule if found.rule != "transformers" else "mlx-lm-0.32")
    if not after.holds or after.evidence.says != "γ" or len(written.tensors) != count:
        raise InputError(
            f"{out}: not kept, as the copy would not be right either. {after.sentence} Convert the "
            "original again."
        )
    return after
