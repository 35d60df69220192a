"""Arbitration: a candidate's error against float64, judged by the oracle's own.

Rounding errors scatter widely: one ill-conditioned token can have ten times the error in one
runtime that it has in the other, and pass it on. So each forward is held to a wide factor of the
oracle's error, and to a narrow one the *typical* error: the median over all vectors (the last axis)
of a program's forwards, which a few unlucky tokens do not move and a systematic fault does. No
error passes the rule's ceiling, however wrong the oracle is.
"""

from collections import defaultdict

import numpy as np

from parity.bits import (
    all_finite,
    is_float,
    relative_rms,
    same_bits_and_finite,
    ulp_distances,
)
from parity.policy import Rule
from parity.trace import Trace


class TypicalErrors:
    """Median relative errors: the candidate's, the oracle's, and that of rounding alone."""

    def __init__(self, candidate: Trace, oracle: Trace, truth: Trace) -> None:
        errors: dict[str, list[np.ndarray]] = defaultdict(list)
        for (forward, name), exact in truth.tensors.items():
            ours, theirs = candidate.get(forward, name), oracle.get(forward, name)
            if ours is None or theirs is None or not comparable(ours, theirs, exact):
                continue  # judged on its own
            values = (ours, theirs, rounded(exact, ours.dtype))
            errors[name].append(np.stack([vector_errors(v, exact) for v in values]))
        self._medians = {
            name: np.median(np.concatenate(parts, axis=1), axis=1) for name, parts in errors.items()
        }

    def of(self, name: str) -> tuple[float, float]:
        """Return (the candidate's error, the larger of the oracle's and of rounding)."""
        ours, theirs, rounding = self._medians.get(name, (0.0, 0.0, 0.0))
        return float(ours), float(max(theirs, rounding))


def vector_errors(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return |value − exact| / |exact| of each vector along the last axis; 0 for 0/0."""
    error = np.linalg.norm(value.astype(np.float64) - exact, axis=-1).ravel()
    scale = np.linalg.norm(exact.astype(np.float64), axis=-1).ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0.0, 0.0, error / scale)


def rounded(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the truth as this dtype can best hold it: no runtime can do better."""
    return exact.astype(dtype) if is_float(dtype) else exact


def comparable(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether all have one shape and are finite."""
    return ours.shape == theirs.shape == exact.shape and all(
        all_finite(x) for x in (ours, theirs, exact)
    )


def numbers(
    ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, rule: Rule, typical: float
) -> tuple[bool, dict[str, object]]:
    """Judge one forward: (within its bound, the numbers of a Comparison)."""
    assert rule.step_factor is not None
    errors = relative_rms(ours, exact), relative_rms(theirs, exact)
    rounding = relative_rms(rounded(exact, ours.dtype), exact)
    assert rule.ceiling is not None
    bound = min(rule.step_factor * max(errors[1], typical, rounding), rule.ceiling)
    found: dict[str, object] = {
        "candidate_to_truth": errors[0],
        "oracle_to_truth": errors[1],
        "candidate_to_oracle": relative_rms(ours, theirs),
        "max_abs": float(np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))),
        "bound": bound,
        "verdict": "within",
    }
    if ours.dtype == theirs.dtype and is_float(ours.dtype):
        found["max_ulp"] = int(ulp_distances(ours, theirs).max())
        if same_bits_and_finite(ours, theirs)[0]:
            found["verdict"] = "identical"
    return errors[0] <= bound, found
