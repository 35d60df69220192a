"""States: what a runner holds between steps, row by row, and their comparison."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity.compare import Comparison, bitwise, mismatch, missing
from parity.policy import Pair
from parity.taps import FULL, LINEAR, order

NAMES = {
    LINEAR: ("linear_attn.conv_tail", "linear_attn.recurrent_state", "linear_attn.offset"),
    FULL: ("self_attn.keys", "self_attn.values", "self_attn.offset"),
}
"""Layer type -> the names of a layer's states: taps, and the count of tokens of a linear layer."""

OPTIONAL = "linear_attn.offset"
"""Not every runtime counts tokens in its linear layers; compared where both sides do at all."""

LOGITS = "logits"

RowStates = dict[str, np.ndarray]
"""Full name -> array of one row: conv tail [n, C], recurrent state [Hv, Dv, Dk], keys and values
[Hkv, T, D] of its T tokens without padding, offsets int32 [1]. `logits` [V] are those of the last
token of the forward just run, absent where the row had none."""


@dataclass
class States:
    """The states of each row after each moment of a program: `moments[moment][row]`.

    A row that has seen nothing has zeros, and keys and values of no tokens.
    """

    runner: str
    layer_types: tuple[str, ...]
    info: dict[str, Any] = field(default_factory=dict)
    moments: list[list[RowStates]] = field(default_factory=list)


def names(layer_types: tuple[str, ...]) -> list[str]:
    """Return the full names of all states, layer by layer, and `logits`."""
    layers = [f"layers.{i}.{name}" for i, kind in enumerate(layer_types) for name in NAMES[kind]]
    return [*layers, LOGITS]


def compare_states(
    candidate: States, oracle: States, pair: Pair, layer_types: tuple[str, ...]
) -> list[Comparison]:
    """Judge every state of every moment and row, under rules that are not `arbitrated`.

    Comparisons come by moment, then in the order of `names`, then by row; `row` and the detail name
    the row. States that a side lacks, and names that are none, are `missing`; of `OPTIONAL` ones
    only where the side shows some.
    """
    results = []
    shown = [{n for rows in s.moments for row in rows for n in row} for s in (candidate, oracle)]
    uncounted = {n for n in names(layer_types) if n.endswith(OPTIONAL)} - (shown[0] & shown[1])
    due = {n for n in names(layer_types) if n != LOGITS and not n.endswith(OPTIONAL)}
    moments = max(len(candidate.moments), len(oracle.moments))
    for moment in range(moments):
        ours, theirs = (
            side.moments[moment] if moment < len(side.moments) else []
            for side in (candidate, oracle)
        )
        rows = range(max(len(ours), len(theirs)))
        for name in _known_and_other(layer_types, [*ours, *theirs]):
            for row in rows if name not in uncounted else ():
                a, b = (side[row].get(name) if row < len(side) else None for side in (ours, theirs))
                if a is None and b is None and name not in due:
                    continue
                seen = _judged(name, a, b, candidate.runner, oracle.runner, pair, layer_types)
                detail = f"row {row}: {seen.detail}" if seen.detail else ""
                results.append(replace(seen, forward=moment, row=row, detail=detail))
    return results


def _known_and_other(layer_types: tuple[str, ...], rows: list[RowStates]) -> Iterator[str]:
    known = names(layer_types)
    yield from known
    yield from sorted({name for row in rows for name in row} - set(known))


def _judged(
    name: str,
    a: np.ndarray | None,
    b: np.ndarray | None,
    candidate: str,
    oracle: str,
    pair: Pair,
    layer_types: tuple[str, ...],
) -> Comparison:
    taps = order(layer_types)
    if name not in taps and name not in names(layer_types):
        detail = "is no state of this model"
        return Comparison(0, name, "missing", "", "names match exactly", detail)
    rule = pair.rule(taps[name][1].kind if name in taps else "exact")
    assert rule.require != "arbitrated"
    found = missing(a, b, candidate, oracle)
    if found is None:
        assert a is not None
        assert b is not None
        found = mismatch(a, b, rule, b.dtype) or bitwise(a, b, rule)
    return Comparison(0, name, require=rule.require, reason=rule.reason, **found)  # type: ignore[arg-type]
