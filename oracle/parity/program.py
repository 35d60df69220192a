"""Programs: plain lists of steps that drive a session, as JSON on disk.

`{"schema": 1, "steps": [{"op": "prefill", "ids": [[...], ...], "chunk": 3}, {"op": "decode",
"ids": [[7], [9]]}]}`. Ids are one list a row; `parity.steps` has all steps. A prefill with `chunk`
is one forward for each chunk. Traces number the `moments`: each forward, and each step without one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.steps import FORWARDS, Fail, Step, check_keep, parse_steps
from qwen35.errors import InputError

SCHEMA = 1
_PLAIN = {"prefill", "decode"}
_EVEN = _PLAIN | {"filter", "extract"}


class ProgramError(InputError):
    """A program that cannot be run; the message names the step and the field."""


@dataclass(frozen=True)
class Moment:
    """One forward of a step, or a step without forwards (an `extend` with all of its program).

    `at` is the step's index as written; `ids` [B, S] and `tokens` [B], each row's count of them,
    are those of the forward, empty where there is none.
    """

    at: int
    step: Step
    ids: np.ndarray
    tokens: np.ndarray

    @property
    def is_forward(self) -> bool:
        """Whether tokens are run."""
        return self.ids.size > 0


@dataclass(frozen=True)
class Program:
    """A validated program; `steps` as written, `source` names where it came from."""

    steps: tuple[Step, ...]
    source: str = "<program>"

    @property
    def rows(self) -> int:
        """The number of rows B at the start."""
        return self.steps[0].ids.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether it only appends tokens, the same number to each row."""
        return self.needs() <= _PLAIN

    @property
    def is_even(self) -> bool:
        """Whether it only appends tokens, as many to each row, and chooses rows."""
        return self.needs() <= _EVEN

    def chosen_rows(self) -> list[list[int] | None]:
        """Return, for each forward, which rows of the forward before are its, None for all."""
        found: list[list[int] | None] = []
        rows: list[int] | None = None
        for moment in self.moments():
            step = moment.step
            if moment.is_forward:
                found.append(rows)
                rows = None
            elif step.chosen is not None:
                rows = [row if rows is None else rows[row] for row in step.chosen]
        return found

    def needs(self) -> set[str]:
        """Return what a runner must be able to do; see `Step.needs`."""
        return set().union(*(step.needs() for step in self.steps))

    def moments(self) -> list[Moment]:
        """Return what happens, one after the other."""
        out = []
        for at, step in enumerate(self.steps):
            none = (step.ids, np.zeros(0, np.int64))
            out += [Moment(at, step, *forward) for forward in step.forwards() or [none]]
        return out

    def forwards(self) -> list[tuple[int, str, np.ndarray]]:
        """Return (index of the step as written, op, ids [B, S]) for each forward.

        Raises ProgramError where these and `chosen_rows` are not all that happens: see `moments`,
        whose numbering of a plain program is the same.
        """
        if not self.is_even:
            others = ", ".join(sorted(self.needs() - _EVEN))
            raise ProgramError(
                f"{self.source}: its forwards alone leave out {others}. Compare it by states."
            )
        return [(m.at, m.step.op, m.ids) for m in self.moments() if m.is_forward]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `parse` reads."""
        return {"schema": SCHEMA, "steps": [step.to_json() for step in self.steps]}

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON form."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check_vocabulary(self, size: int) -> None:
        """Raise ProgramError for an id outside [0, size): MLX would read garbage silently.

        Padding may hold any id; `within_vocabulary` makes it safe to run.
        """
        _check_vocabulary(self.steps, size, f"{self.source}: steps")


def within_vocabulary(ids: np.ndarray, size: int) -> np.ndarray:
    """Return int32 ids with those of padding moved into [0, size)."""
    return np.clip(ids, 0, size - 1).astype(np.int32)


def _check_vocabulary(steps: Sequence[Step], size: int, where: str) -> None:
    for at, step in enumerate(steps):
        bad = (step.ids < 0) | (step.ids >= size)
        if step.op in FORWARDS:
            bad &= np.arange(step.ids.shape[1]) < step.counts[:, None]
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ProgramError(
                f"{where}[{at}].ids[{row}][{column}] is {step.ids[row, column]}, outside the "
                f"vocabulary of {size}. Use ids from 0 to {size - 1}."
            )
        _check_vocabulary(step.program, size, f"{where}[{at}].program")


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
    steps = parse_steps(value["steps"], "steps", fail)
    _check_order(steps, "steps", fail)
    return Program(steps, source)


def _check_order(steps: Sequence[Step], where: str, fail: Fail) -> int:
    """Hold each step to what the ones before it leave; return the number of rows at the end."""
    if steps[0].op not in FORWARDS:
        raise fail(
            f"{where}[0]", f"is {steps[0].op!r}", f"Begin with tokens: {', '.join(FORWARDS)}."
        )
    rows, verified = steps[0].ids.shape[0], None
    snapshots: dict[str, int] = {}
    for at, step in enumerate(steps):
        here = f"{where}[{at}]"
        if (step.op == "accept") != (verified is not None):
            problem = f"is {step.op!r} " + (
                "without a verify" if verified is None else "in a round"
            )
            raise fail(here, problem, "A verify step and its accept follow each other.")
        if step.op in FORWARDS and step.ids.shape[0] != rows:
            raise fail(
                here, f"has {step.ids.shape[0]} rows, the session {rows} there", "Give each row."
            )
        if verified is not None:
            check_keep(step, rows, verified, here, fail)
        verified = step.ids.shape[1] if step.op == "verify" else None
        if step.op == "snapshot":
            assert step.name is not None
            snapshots[step.name] = rows
        elif step.op == "restore":
            if step.name not in snapshots:
                known = ", ".join(snapshots) or "none"
                raise fail(
                    f"{here}.name", f"is {step.name!r}, no snapshot before it", f"Known: {known}."
                )
            rows = snapshots[step.name]
        elif step.op == "extend":
            rows += _check_order(step.program, f"{here}.program", fail)
        else:
            rows = _rows_chosen(step, rows, here, fail)
    if verified is not None:
        raise fail(f"{where}[{at}]", "is 'verify' without an accept", "Say how many tokens stay.")
    return rows


def _rows_chosen(step: Step, rows: int, here: str, fail: Fail) -> int:
    chosen = step.rows if step.op == "filter" else (step.row,) if step.op == "extract" else None
    if chosen is None:
        return rows
    name = "rows" if step.op == "filter" else "row"
    for row in chosen:
        if row is None or not 0 <= row < rows:
            raise fail(f"{here}.{name}", f"has row {row} of {rows}", f"Give 0 to {rows - 1}.")
    if len(set(chosen)) != len(chosen):
        raise fail(f"{here}.{name}", f"is {list(chosen)}, a row twice", "Name each row once.")
    return len(chosen)


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
