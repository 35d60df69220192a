"""Histories: the tokens that each row of a program has seen, were there only appending."""

from collections.abc import Sequence

from parity.program import Program
from parity.steps import Step

Tokens = tuple[int, ...]


def histories(program: Program) -> list[list[Tokens]]:
    """Return, after each moment of the program, every row's tokens in order.

    After a `verify` they hold its tokens, after its `accept` those that were kept. Padding is none.
    """
    rows: list[Tokens] = []
    before: list[Tokens] = []  # a round's verify
    snapshots: dict[str, list[Tokens]] = {}
    found = []
    for moment in program.moments():
        step = moment.step
        if moment.is_forward:
            before = rows or [()] * len(moment.ids)
            rows = [
                seen + tuple(ids[:count])
                for seen, ids, count in zip(
                    before, moment.ids.tolist(), moment.tokens.tolist(), strict=True
                )
            ]
        elif step.op == "accept":
            kept = _each(step, len(rows))
            rows = [
                seen[: len(start) + keep]
                for seen, start, keep in zip(rows, before, kept, strict=True)
            ]
        elif step.op == "filter":
            assert step.rows is not None
            rows = [rows[row] for row in step.rows]
        elif step.op == "extract":
            assert step.row is not None
            rows = [rows[step.row]]
        elif step.op == "extend":
            rows = rows + histories(Program(step.program, program.source))[-1]
        elif step.op == "snapshot":
            assert step.name is not None
            snapshots[step.name] = rows
        elif step.op == "restore":
            assert step.name is not None
            rows = snapshots[step.name]
        found.append(rows)
    return found


def _each(step: Step, rows: int) -> Sequence[int]:
    assert step.keep is not None
    return (step.keep,) * rows if isinstance(step.keep, int) else step.keep
