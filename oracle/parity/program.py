"""Programs: plain lists of steps that drive a session, as JSON on disk.

`{"schema": 1, "steps": [{"op": "prefill", "ids": [[...], ...], "chunk": 3}, {"op": "decode",
"ids": [[7], [9]]}]}`. Ids are one list a row. A prefill with `chunk` is one forward for each chunk;
traces number the forwards, so `forwards` is what runners loop over.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwen35.errors import InputError

SCHEMA = 1
_FIELDS = {"prefill": {"op", "ids", "chunk"}, "decode": {"op", "ids"}}


class ProgramError(InputError):
    """A program that cannot be run; the message names the step and the field."""


@dataclass(frozen=True)
class Step:
    """One step: `op` is `prefill` or `decode`, `ids` int64 [B, S], `chunk` tokens a forward."""

    op: str
    ids: np.ndarray
    chunk: int | None = None


@dataclass(frozen=True)
class Program:
    """A validated program; `steps` as written, `source` names where it came from."""

    steps: tuple[Step, ...]
    source: str = "<program>"

    @property
    def rows(self) -> int:
        """The number of rows B."""
        return self.steps[0].ids.shape[0]

    def forwards(self) -> list[tuple[int, str, np.ndarray]]:
        """Return (index of the step as written, op, ids [B, S]) for each forward."""
        out = []
        for at, step in enumerate(self.steps):
            width = step.ids.shape[1]
            for start in range(0, width, step.chunk or width):
                out.append((at, step.op, step.ids[:, start : start + (step.chunk or width)]))
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `parse` reads."""
        steps = []
        for step in self.steps:
            entry: dict[str, Any] = {"op": step.op, "ids": step.ids.tolist()}
            if step.chunk is not None:
                entry["chunk"] = step.chunk
            steps.append(entry)
        return {"schema": SCHEMA, "steps": steps}

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON form."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check_vocabulary(self, size: int) -> None:
        """Raise ProgramError for an id outside [0, size): MLX would read garbage silently."""
        for at, step in enumerate(self.steps):
            bad = np.argwhere((step.ids < 0) | (step.ids >= size))
            if len(bad):
                row, column = bad[0]
                raise ProgramError(
                    f"{self.source}: steps[{at}].ids[{row}][{column}] is "
                    f"{step.ids[row, column]}, outside the vocabulary of {size}. "
                    f"Use ids from 0 to {size - 1}."
                )


def parse(value: Any, source: str = "<program>") -> Program:
    """Validate a decoded JSON value. Raises ProgramError naming `source`, step and field."""

    def fail(where: str, problem: str, remedy: str) -> ProgramError:
        return ProgramError(f"{source}: {where} {problem}. {remedy}")

    if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
        raise fail(
            "the file", "is no object with a list 'steps'", 'Write {"schema": 1, "steps": …}.'
        )
    if type(value.get("schema")) is not int or value["schema"] != SCHEMA:  # True == 1 == 1.0
        raise fail("schema", f"is {value.get('schema')!r}", f"This version reads schema {SCHEMA}.")
    if unknown := set(value) - {"schema", "steps"}:
        raise fail("the file", f"has unknown fields {sorted(unknown)}", "Remove them.")
    if not value["steps"]:
        raise fail("steps", "is empty", "A program needs at least one prefill.")
    steps: list[Step] = []
    for at, entry in enumerate(value["steps"]):
        where = f"steps[{at}]"
        op = entry.get("op") if isinstance(entry, dict) else None
        if not isinstance(op, str) or op not in _FIELDS:
            raise fail(where, f"has op {op!r}", f"Known steps: {', '.join(sorted(_FIELDS))}.")
        if unknown := set(entry) - _FIELDS[op]:
            raise fail(where, f"has unknown fields {sorted(unknown)}", "Remove them.")
        ids = _ids(entry.get("ids"), where, fail)
        if steps and len(ids) != len(steps[0].ids):
            raise fail(
                where,
                f"has {len(ids)} rows, the first step {len(steps[0].ids)}",
                "Keep one number.",
            )
        if op == "decode" and ids.shape[1] != 1:
            raise fail(where, f"decodes {ids.shape[1]} tokens a row", "A decode step takes one.")
        chunk = entry.get("chunk")
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise fail(
                f"{where}.chunk", f"is {chunk!r}", "Give a whole number of tokens, 1 or more."
            )
        steps.append(Step(op, ids, chunk))
    return Program(tuple(steps), source)


def _ids(value: Any, where: str, fail: Any) -> np.ndarray:
    rows = value if isinstance(value, list) and value else None
    if rows is None or not all(isinstance(row, list) for row in rows):
        raise fail(f"{where}.ids", "is no list of rows", "Give one list of token ids a row.")
    if any(type(token) is not int for row in rows for token in row):
        raise fail(f"{where}.ids", "holds something that is no whole number", "Give token ids.")
    if len({len(row) for row in rows}) != 1:
        raise fail(f"{where}.ids", "has rows of unequal length", "Give rows of one length.")
    if not rows[0]:
        raise fail(f"{where}.ids", "is an empty prompt", "Give at least one token a row.")
    if any(abs(token) >= 2**63 for row in rows for token in row):
        raise fail(f"{where}.ids", "holds an id beyond 64 bits", "Give token ids.")
    return np.array(rows, dtype=np.int64)


class _TwiceError(Exception):
    """A key that an object has twice; JSON readers differ in which of them they keep."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _TwiceError(repr(key))
        value[key] = item
    return value


def load(path: str | Path) -> Program:
    """Read a program file. Raises ProgramError if it cannot be read or is malformed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"{path}: cannot be read ({error}). Give a JSON program file.") from None
    try:
        return parse(json.loads(text, object_pairs_hook=_object), str(path))
    except _TwiceError as error:
        raise ProgramError(f"{path}: has {error} twice in one object. Keep one.") from None
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{path}: is no JSON ({error}). The README shows one.") from None


def build(ids: Sequence[Sequence[int]], decode: int = 0, chunk: int | None = None) -> Program:
    """Return a program that prefills all but the last `decode` tokens a row and decodes those."""
    rows = np.asarray(ids, dtype=np.int64)
    cut = rows.shape[1] - decode
    steps = [Step("prefill", rows[:, :cut], chunk)]
    steps += [Step("decode", rows[:, t : t + 1]) for t in range(cut, rows.shape[1])]
    return Program(tuple(steps))
