"""Arbitration: a candidate's error against float64, judged by the oracle's own.

Rounding errors of one tensor in one forward scatter widely where it is small or ill-conditioned,
those of a whole program do not. So each forward is held to a wide factor, and the errors pooled
over the program's forwards to a narrow one; where every layer is fed the oracle's input, errors of
one kind of tap are alike in all layers, and are pooled over those too.
"""

from collections import defaultdict

import numpy as np

from parity.bits import (
    all_finite,
    is_float,
    ratio,
    relative_rms,
    same_bits_and_finite,
    square_sums,
    ulp_distances,
)
from parity.policy import Rule
from parity.taps import split
from parity.trace import Trace


class PooledErrors:
    """Errors of the candidate, the oracle and of rounding to the candidate's dtype, pooled."""

    def __init__(self, candidate: Trace, oracle: Trace, truth: Trace, over_layers: bool) -> None:
        self._over_layers = over_layers
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4))
        for (forward, name), exact in truth.tensors.items():
            ours, theirs = candidate.get(forward, name), oracle.get(forward, name)
            if ours is None or theirs is None or not comparable(ours, theirs, exact):
                continue  # judged on its own
            scale = square_sums(exact, exact)[1]
            errors = (square_sums(v, exact)[0] for v in (ours, theirs, rounded(exact, ours.dtype)))
            sums[self.key(name)] += [*errors, scale]
        self._errors = {
            key: tuple(ratio(error, scale) for error in errors)
            for key, (*errors, scale) in sums.items()
        }

    def key(self, name: str) -> str:
        """Return what a tap is pooled under."""
        return split(name)[1] if self._over_layers else name

    def of(self, name: str) -> tuple[float, float]:
        """Return (the candidate's error, the larger of the oracle's and of rounding)."""
        ours, theirs, rounding = self._errors.get(self.key(name), (0.0, 0.0, 0.0))
        return ours, max(theirs, rounding)


def rounded(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the truth as this dtype can best hold it: no runtime can do better."""
    return exact.astype(dtype) if is_float(dtype) else exact


def comparable(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether all have one shape and are finite."""
    return ours.shape == theirs.shape == exact.shape and all(
        all_finite(x) for x in (ours, theirs, exact)
    )


def numbers(
    ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, rule: Rule, pooled: float
) -> tuple[bool, dict[str, object]]:
    """Judge one forward: (within its bound, the numbers of a Comparison)."""
    assert rule.step_factor is not None
    errors = relative_rms(ours, exact), relative_rms(theirs, exact)
    rounding = relative_rms(rounded(exact, ours.dtype), exact)
    bound = rule.step_factor * max(errors[1], pooled, rounding)
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
