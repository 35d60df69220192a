"""Steps: what a program is a list of, and the JSON form of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen35.errors import InputError

FORWARDS = ("prefill", "decode", "verify")
"""The steps that carry ids."""

FIELDS: dict[str, tuple[str, ...]] = {
    "prefill": ("ids", "lengths", "chunk"),
    "decode": ("ids",),
    "verify": ("ids",),
    "accept": ("keep",),
    "filter": ("rows",),
    "extend": ("program",),
    "extract": ("row",),
    "snapshot": ("name",),
    "restore": ("name",),
}
"""Step -> the fields it has beside `op`."""
_OPTIONAL = ("lengths", "chunk")

Fail = Callable[[str, str, str], InputError]
"""(where, problem, remedy) -> the error to raise."""


def _no_ids() -> np.ndarray:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class Step:
    """One step; fields that its `op` has no use for keep their defaults.

    - `prefill`: `ids` int64 [B, S]; `lengths`, one a row from 0 to S, where the rest of a row is
      right padding of any content; `chunk` tokens a forward.
    - `decode`: `ids` [B, 1].
    - `verify`: `ids` [B, S], the forward of a round, and `accept`: `keep`, 0 to S of its tokens,
      a number or one a row. One follows the other.
    - `filter`: the session goes on with `rows`, in that order; `extract`: with `row` alone.
    - `extend`: the rows that the steps `program` make, from an empty cache, join below.
    - `snapshot` and `restore`: under `name`.
    """

    op: str
    ids: np.ndarray = field(default_factory=_no_ids)
    chunk: int | None = None
    lengths: tuple[int, ...] | None = None
    keep: int | tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    row: int | None = None
    name: str | None = None
    program: tuple["Step", ...] = ()

    @property
    def counts(self) -> np.ndarray:
        """The tokens of each row, int64 [B]: `lengths`, or all S."""
        rows, tokens = self.ids.shape
        return np.array(self.lengths if self.lengths is not None else [tokens] * rows, np.int64)

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The rows that a `filter` or `extract` goes on with, None for other steps."""
        return (self.row,) if self.row is not None else self.rows

    def forwards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids [B, S], tokens of each row [B]) of each forward; none for a step without ids.

        With `lengths` and `chunk`, rows end in different chunks.
        """
        width = self.ids.shape[1]
        chunk = self.chunk or width
        out = []
        for start in range(0, width, chunk) if width else ():
            ids = self.ids[:, start : start + chunk]
            out.append((ids, np.clip(self.counts - start, 0, ids.shape[1])))
        return out

    def needs(self) -> set[str]:
        """Return what a runner must be able to do: the step, `lengths`, those of `program`."""
        own = {self.op} | ({"lengths"} if self.lengths is not None else set())
        return own.union(*(step.needs() for step in self.program))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `parse_step` reads."""
        entry: dict[str, Any] = {"op": self.op}
        for name in FIELDS[self.op]:
            value = getattr(self, name)
            if name == "ids":
                entry[name] = value.tolist()
            elif name == "program":
                entry[name] = [step.to_json() for step in value]
            elif value is not None:
                entry[name] = list(value) if isinstance(value, tuple) else value
        return entry


def parse_step(entry: Any, where: str, fail: Fail) -> Step:
    """Validate one decoded JSON step by itself; `where` is its place, e.g. `steps[2]`."""
    op = entry.get("op") if isinstance(entry, dict) else None
    if not isinstance(op, str) or op not in FIELDS:
        raise fail(where, f"has op {op!r}", f"Known steps: {', '.join(sorted(FIELDS))}.")
    if unknown := set(entry) - {"op", *FIELDS[op]}:
        raise fail(where, f"has unknown fields {sorted(unknown)}", "Remove them.")
    values: dict[str, Any] = {}
    for name in FIELDS[op]:
        if name in _OPTIONAL and entry.get(name) is None:
            continue
        values[name] = _PARSE[name](entry.get(name), f"{where}.{name}", fail)
    step = Step(op, **values)
    if op == "decode" and step.ids.shape[1] != 1:
        raise fail(where, f"decodes {step.ids.shape[1]} tokens a row", "A decode step takes one.")
    if step.lengths is not None:
        rows, tokens = step.ids.shape
        _check_counts(step.lengths, rows, tokens, f"{where}.lengths", fail)
    return step


def parse_steps(value: Any, where: str, fail: Fail) -> tuple[Step, ...]:
    """Validate a list of decoded JSON steps, each by itself."""
    if not isinstance(value, list) or not value:
        raise fail(where, "is empty" if value == [] else "is no list of steps", "Give the steps.")
    return tuple(parse_step(entry, f"{where}[{at}]", fail) for at, entry in enumerate(value))


def _check_counts(counts: tuple[int, ...], rows: int, tokens: int, where: str, fail: Fail) -> None:
    if len(counts) != rows:
        raise fail(where, f"has {len(counts)} entries for {rows} rows", "Give one a row.")
    for row, count in enumerate(counts):
        if not 0 <= count <= tokens:
            raise fail(f"{where}[{row}]", f"is {count}", f"Give 0 to {tokens}.")


def check_keep(step: Step, rows: int, tokens: int, where: str, fail: Fail) -> None:
    """Hold an accept's `keep` to the `tokens` that were verified in each of `rows`."""
    keep = step.keep
    if isinstance(keep, tuple):
        _check_counts(keep, rows, tokens, f"{where}.keep", fail)
    elif keep is None or not 0 <= keep <= tokens:
        raise fail(f"{where}.keep", f"is {keep}", f"The round has 0 to {tokens} tokens to keep.")


def _ids(value: Any, where: str, fail: Fail) -> np.ndarray:
    rows = value if isinstance(value, list) and value else None
    if rows is None or not all(isinstance(row, list) for row in rows):
        raise fail(where, "is no list of rows", "Give one list of token ids a row.")
    if any(type(token) is not int for row in rows for token in row):
        raise fail(where, "holds something that is no whole number", "Give token ids.")
    if len({len(row) for row in rows}) != 1:
        raise fail(
            where, "has rows of unequal length", "Pad them, and give a prefill their `lengths`."
        )
    if not rows[0]:
        raise fail(where, "is an empty prompt", "Give at least one token a row.")
    if any(abs(token) >= 2**63 for row in rows for token in row):
        raise fail(where, "holds an id beyond 64 bits", "Give token ids.")
    return np.array(rows, dtype=np.int64)


def _chunk(value: Any, where: str, fail: Fail) -> int:
    if type(value) is not int or value < 1:
        raise fail(where, f"is {value!r}", "Give a whole number of tokens, 1 or more.")
    return value


def _row(value: Any, where: str, fail: Fail) -> int:
    if type(value) is not int:
        raise fail(where, f"is {value!r}", "Give a whole number.")
    return value


def _numbers(value: Any, where: str, fail: Fail) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(n) is not int for n in value):
        raise fail(where, f"is {value!r}", "Give a list of whole numbers.")
    return tuple(value)


def _keep(value: Any, where: str, fail: Fail) -> int | tuple[int, ...]:
    if type(value) is int:
        return value
    if not isinstance(value, list):
        raise fail(where, f"is {value!r}", "Give a whole number, or a list of one a row.")
    return _numbers(value, where, fail)


def _name(value: Any, where: str, fail: Fail) -> str:
    if not isinstance(value, str) or not value:
        raise fail(where, f"is {value!r}", "Give the snapshot a name.")
    return value


_PARSE: dict[str, Callable[[Any, str, Fail], Any]] = {
    "ids": _ids,
    "lengths": _numbers,
    "chunk": _chunk,
    "keep": _keep,
    "rows": _numbers,
    "row": _row,
    "name": _name,
    "program": parse_steps,
}
