"""Comparison: a pure function of recorded traces and a policy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from parity.arbitrate import Arbiter, Wrong, comparable
from parity.bits import (
    all_finite,
    by_name,
    is_float,
    relative_rms,
    same_bits_and_finite,
    ulp_distances,
    words,
)
from parity.policy import Pair, Rule
from parity.taps import Tap, inputs, order
from parity.trace import Trace
from qwen35.errors import InputError

Verdict = Literal["identical", "within", "exceeds", "missing", "shape", "dtype", "nonfinite"]
FAILED: tuple[Verdict, ...] = ("exceeds", "missing", "shape", "dtype", "nonfinite")
"""The verdicts that fail, mildest first."""


@dataclass(frozen=True)
class Comparison:
    """The verdict on one tap of one forward, with its numbers (None where not taken).

    The three errors are relative RMS: candidate and oracle to the float64 truth, and candidate to
    oracle. `rounding_to_truth` is the largest that rounding alone made, `bound` what the first must
    not exceed when arbitrated, and `wrong` who is too far from the truth. Where states are compared
    row by row, `row` is its number and `forward` that of the program's moment.
    """

    forward: int
    tap: str
    verdict: Verdict
    require: str
    reason: str
    detail: str = ""
    max_ulp: int | None = None
    max_abs: float | None = None
    candidate_to_truth: float | None = None
    oracle_to_truth: float | None = None
    candidate_to_oracle: float | None = None
    rounding_to_truth: float | None = None
    bound: float | None = None
    attribution: Literal["makes", "carries"] | None = None
    wrong: Wrong | None = None
    row: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the verdict fails."""
        return self.verdict in FAILED


def compare(
    candidate: Trace,
    oracle: Trace,
    pair: Pair,
    layer_types: tuple[str, ...],
    forwards: int,
    dtype: str,
    arbiter: Arbiter | None = None,
) -> list[Comparison]:
    """Judge every tap of every forward, in order of computation.

    `dtype` is the one the run computes in. Taps that either side lacks are `missing`, and so are
    names that are no taps of this model. `arbiter` is needed where the pair is arbitrated. Raises
    InputError for a trace of a model with other layers.
    """
    for trace in (candidate, oracle):
        if trace.layer_types != layer_types:
            raise InputError(
                f"{trace.runner} recorded layers {', '.join(trace.layer_types)}; the model has "
                f"{', '.join(layer_types)}. Compare traces of one model."
            )
    taps = order(layer_types)
    found: dict[tuple[int, str], Comparison] = {}
    for forward in range(forwards):
        for name, (_, tap) in taps.items():
            rule = pair.rule(tap.kind)
            a, b = candidate.get(forward, name), oracle.get(forward, name)
            due = by_name(dtype if tap.dtype == "working" else tap.dtype)
            seen = missing(a, b, candidate.runner, oracle.runner) or mismatch(a, b, rule, due)
            if seen is None:
                assert a is not None
                assert b is not None
                if rule.require == "arbitrated":
                    assert arbiter is not None
                    seen = _arbitrated(forward, name, a, b, rule, arbiter)
                else:
                    seen = bitwise(a, b, rule)
            found[forward, name] = Comparison(
                forward,
                name,
                require=rule.require,
                reason=rule.reason,
                **seen,  # type: ignore[arg-type]
            )
    if arbiter is not None:
        found |= _beyond_their_typical(found, arbiter, pair, taps)
    results = [_attributed(item, found, taps, pair, len(layer_types)) for item in found.values()]
    return results + list(_unknown(candidate, oracle, taps, forwards))


def _beyond_their_typical(
    found: dict[tuple[int, str], Comparison],
    arbiter: Arbiter,
    pair: Pair,
    taps: dict[str, tuple[int, Tap]],
) -> dict[tuple[int, str], Comparison]:
    """Fail, where the typical error exceeds its factor, the comparison with the largest share."""
    largest: dict[str, Comparison] = {}
    for item in found.values():
        if item.require == "arbitrated" and item.bound is not None:
            other = largest.setdefault(item.tap, item)
            if _share(item) > _share(other):
                largest[item.tap] = item
    failed = {}
    for name, errors in arbiter.typical():
        rule = pair.rule(taps[name][1].kind)
        worst = largest.get(name)
        if worst is None or worst.failed:
            continue
        assert rule.ceiling is not None
        wrong, said = errors.beyond(arbiter.typical_factor(rule), rule.ceiling)
        if wrong is not None:
            detail = f"in the median over the program {said}; this forward has the largest share"
            failed[worst.forward, name] = replace(
                worst, verdict="exceeds", wrong=wrong, detail=detail
            )
    return failed


def _share(item: Comparison) -> float:
    return (item.candidate_to_truth or 0.0) / item.bound if item.bound else 0.0


def missing(
    a: np.ndarray | None, b: np.ndarray | None, candidate: str, oracle: str
) -> dict[str, object] | None:
    """Return the verdict that a side lacks the tensor, or None."""
    lacking = [name for name, value in ((candidate, a), (oracle, b)) if value is None]
    if not lacking:
        return None
    return {"verdict": "missing", "detail": f"not recorded by {' and '.join(lacking)}"}


def mismatch(
    a: np.ndarray | None, b: np.ndarray | None, rule: Rule, due: np.dtype
) -> dict[str, object] | None:
    """Return the verdict that shapes or dtypes differ, or None; `due` is the tap's own dtype."""
    assert a is not None
    assert b is not None
    if a.shape != b.shape:
        return {"verdict": "shape", "detail": f"{list(a.shape)}, due {list(b.shape)}"}
    # An arbitrated oracle may compute a tap in another dtype; the candidate may not.
    if a.dtype != (wanted := due if rule.require == "arbitrated" else b.dtype):
        return {"verdict": "dtype", "detail": f"{a.dtype}, due {wanted}"}
    return None


def bitwise(a: np.ndarray, b: np.ndarray, rule: Rule) -> dict[str, object]:
    """Return the verdict, and its numbers, under a rule that is not arbitrated."""
    same, finite = same_bits_and_finite(a, b)
    if not finite:
        return {"verdict": "nonfinite", "detail": _nonfinite(a, b)}
    if same:
        return {"verdict": "identical", "max_ulp": 0, "max_abs": 0.0}
    left, right = a.astype(np.float64), b.astype(np.float64)
    seen: dict[str, object] = {
        "max_abs": float(np.max(np.abs(left - right))),
        "candidate_to_oracle": relative_rms(a, b),
        "detail": _first_difference(a, b),
    }
    if is_float(a.dtype):
        seen["max_ulp"] = int(ulp_distances(a, b).max())
    within = rule.require == "ulp" and seen.get("max_ulp", np.inf) <= (rule.ulp or 0)  # type: ignore[operator]
    return {"verdict": "within" if within else "exceeds", **seen}


def _arbitrated(
    forward: int, name: str, a: np.ndarray, b: np.ndarray, rule: Rule, arbiter: Arbiter
) -> dict[str, object]:
    if (exact := arbiter.exact(forward, name)) is None:
        return {"verdict": "missing", "detail": "not recorded by the reference"}
    if a.shape != exact.shape:
        return {"verdict": "shape", "detail": f"{list(a.shape)}, due {list(exact.shape)}"}
    if not comparable(a, b, exact):
        return {"verdict": "nonfinite", "detail": _nonfinite(a, b)}
    return arbiter.judge(forward, name, a, b, rule)


def _nonfinite(a: np.ndarray, b: np.ndarray) -> str:
    where = [name for name, value in (("candidate", a), ("oracle", b)) if not all_finite(value)]
    return f"infinity or NaN in {' and '.join(where) or 'the truth'}"


def _first_difference(a: np.ndarray, b: np.ndarray) -> str:
    # NaN is unequal to itself and −0 equal to +0, so the search is over bit patterns.
    at = np.flatnonzero(words(a) != words(b))
    place = tuple(int(i) for i in np.unravel_index(at[0], a.shape))
    return (
        f"first at {list(place)}: {float(a[place])!r}, due {float(b[place])!r}; "
        f"{at.size} of {a.size} elements differ"
    )


def _attributed(
    item: Comparison,
    verdicts: dict[tuple[int, str], Comparison],
    taps: dict[str, tuple[int, Tap]],
    pair: Pair,
    layers: int,
) -> Comparison:
    """Say whether a failing operation makes its difference: its inputs are bit-equal or fed."""
    if not item.failed:
        return item
    now, before = inputs(item.tap, taps[item.tap][1], layers)
    sources = [(item.forward, name) for name in now]
    sources += [(item.forward - 1, name) for name in before if item.forward > 0]
    if pair.feed == "layer":
        fed = {"embed_tokens"} | {f"layers.{i}.output" for i in range(layers)}
        sources = [source for source in sources if source[1] not in fed]
    seen = [verdicts[source].verdict for source in sources]
    if all(verdict == "identical" for verdict in seen):
        attribution: Literal["makes", "carries"] | None = "makes"
    elif any(verdict in FAILED for verdict in seen):
        attribution = "carries"
    else:
        attribution = None
    return replace(item, attribution=attribution)


def _unknown(
    candidate: Trace, oracle: Trace, taps: dict[str, tuple[int, Tap]], forwards: int
) -> Iterator[Comparison]:
    for trace in (candidate, oracle):
        for forward, name in trace.tensors:
            if name not in taps or not 0 <= forward < forwards:
                detail = (
                    f"{trace.runner} recorded a tensor that is no tap of this model and program"
                )
                yield Comparison(forward, name, "missing", "", "names match exactly", detail)
