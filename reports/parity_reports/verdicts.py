"""Verdicts in order of severity, and the tensors of a layer in order of computation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parity.taps import FULL, LAYER_TAPS, LINEAR, all_taps
from parity_reports.text import Result

ASCII = {
    "identical": "=",
    "within": "~",
    "exceeds": "X",
    "missing": "?",
    "shape": "#",
    "dtype": "T",
    "nonfinite": "!",
}
"""One character a verdict, from good to bad, for places without colour."""

PRETTY = ASCII | {"within": "≈", "exceeds": "≠", "nonfinite": "∞"}
MEANING = {
    "identical": "every bit equal",
    "within": "differs, within the policy",
    "exceeds": "differs by more than the policy allows",
    "missing": "one side did not record it",
    "shape": "shapes differ",
    "dtype": "dtypes differ",
    "nonfinite": "infinity or NaN",
}

_SEVERITY = {verdict: at for at, verdict in enumerate(ASCII)}
_TITLES = {LINEAR: "linear attention", FULL: "full attention"}
SHORT_TYPE = {LINEAR: "linear", FULL: "full"}
KIND = {tap.name: tap.kind for _, tap in all_taps(tuple(LAYER_TAPS))}


def severity(verdict: str) -> int:
    """Return the rank of a verdict; one this version does not know ranks as a failure."""
    return _SEVERITY.get(verdict, _SEVERITY["exceeds"])


def fails(verdict: str) -> bool:
    """Whether a verdict is a failure."""
    return severity(verdict) >= _SEVERITY["exceeds"]


def worst(verdicts: Iterable[str]) -> str | None:
    """Return the most severe verdict, or None of none."""
    return max(verdicts, key=severity, default=None)


def full_name(cell: Result) -> str:
    """Return a cell's full tap name."""
    layer, tap = cell.get("layer"), str(cell.get("tap", ""))
    return tap if layer is None else f"layers.{layer}.{tap}"


def pair_state(pair: Result) -> str:
    """Return how one oracle's judgement of one case ended.

    `fails`, `within`, `identical`, or `none` where nothing was compared.
    """
    if pair.get("failed"):
        return "fails"
    if not pair.get("compared"):
        return "none"
    return "within" if pair.get("within") else "identical"


@dataclass(frozen=True)
class Group:
    """Neighbouring columns. `layer_type` is None for taps that layers of every type have."""

    title: str
    layer_type: str | None
    taps: tuple[str, ...]


def column_groups(cells: Iterable[Result]) -> list[Group]:
    """Return the columns of a layer map in order of computation.

    What all layer types share stands once, before and after the mixers; each type's mixer has
    columns of its own. Taps that are in no list come last.
    """
    names = {kind: [tap.name for tap in taps] for kind, taps in LAYER_TAPS.items()}
    shared = set.intersection(*(set(taps) for taps in names.values()))
    order = next(iter(names.values()))
    first_own = next(at for at, name in enumerate(order) if name not in shared)
    before = tuple(name for name in order[:first_own])
    after = tuple(name for name in order[first_own:] if name in shared)
    known = {name for taps in names.values() for name in taps}
    unknown = dict.fromkeys(
        str(cell.get("tap", "")) for cell in cells if cell.get("layer") is not None
    )
    other = tuple(name for name in unknown if name not in known)
    groups = [Group("in", None, before)]
    groups += [
        Group(_TITLES.get(kind, kind), kind, tuple(n for n in taps if n not in shared))
        for kind, taps in names.items()
    ]
    groups.append(Group("block", None, after))
    if other:
        groups.append(Group("unknown", None, other))
    return groups


def failing_first(cases: Sequence[Result]) -> list[Result]:
    """Return the cases, failing ones first, otherwise in the order they ran."""
    return sorted(cases, key=lambda case: not _fails(case))


def _fails(case: Result) -> bool:
    pairs: dict[str, Any] = case.get("pairs") or {}
    return any(pair.get("failed") for pair in pairs.values())
