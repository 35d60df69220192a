"""Arbitration: errors against float64, judged by the oracle's own and by what rounding makes.

Rounding errors scatter: one ill-conditioned token can have ten times the error in one runtime that
it has in the other, and pass it on. So every error is held to a multiple of the larger of two: the
oracle's, and the largest that `parity.roundings` made at the same place. The *typical* error of a
tap, the median over its vectors in a program, has the narrowest multiple, for a systematic fault
moves it and an unlucky token does not; one forward has a wider one, one vector the widest. Below
`FEW` tokens a median is hardly more than one error, and has a forward's multiple. The oracle is
held to the same multiples of the roundings' errors alone: one that is wrong excuses nothing.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from parity.bits import (
    all_finite,
    is_float,
    relative_rms,
    same_bits_and_finite,
    ulp_distances,
    vector_errors,
)
from parity.policy import Rule
from parity.roundings import Roundings
from parity.trace import Trace

FEW = 16
"""Tokens: what the multiples for medians were measured on (docs/arbitration.md)."""

Wrong = Literal["candidate", "oracle", "both"]


@dataclass(frozen=True)
class Errors:
    """Relative errors from float64: the candidate's, the oracle's, and the roundings' largest."""

    candidate: float
    oracle: float
    rounding: float

    def beyond(self, factor: float, ceiling: float) -> tuple[Wrong | None, str]:
        """Return (who exceeds `factor`, in words by how much)."""
        said = []
        oracle_bound = min(factor * self.rounding, ceiling)
        if not self.oracle <= oracle_bound:
            said.append(("oracle", self.oracle, self.rounding))
        scale = self.rounding if said else max(self.oracle, self.rounding)
        if not self.candidate <= min(factor * scale, ceiling):
            said.insert(0, ("candidate", self.candidate, scale))
        if not said:
            return None, ""
        words = (
            f"the {who}'s error is {error:.3g}, due at most {factor:g} times {of:.3g}"
            for who, error, of in said
        )
        wrong: Wrong = "both" if len(said) == 2 else said[0][0]  # type: ignore[assignment]
        return wrong, " and ".join(words)


class Arbiter:
    """What is known of one program: the truth, the roundings and each tap's typical errors."""

    def __init__(self, candidate: Trace, oracle: Trace, truth: Trace, roundings: Roundings) -> None:
        self._truth, self._roundings = truth, roundings
        self._vectors: dict[tuple[int, str], list[np.ndarray]] = {}
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        for (forward, name), exact in truth.tensors.items():
            ours, theirs = candidate.get(forward, name), oracle.get(forward, name)
            if (forward, name) not in roundings.vectors or ours is None or theirs is None:
                continue
            if comparable(ours, theirs, exact):
                own = [vector_errors(ours, exact), vector_errors(theirs, exact)]
                self._vectors[forward, name] = own
                parts[name].append(np.concatenate([own, roundings.vectors[forward, name]]))
        shapes = [
            value.shape for (_, name), value in truth.tensors.items() if name == "embed_tokens"
        ]
        self.tokens = sum(rows * tokens for rows, tokens, _ in shapes)
        self._typical = {name: _typical(np.concatenate(p, axis=1)) for name, p in parts.items()}

    def exact(self, forward: int, name: str) -> np.ndarray | None:
        """Return the truth of a tap, None where there is none."""
        if (forward, name) not in self._roundings.vectors:
            return None
        return self._truth.get(forward, name)

    def typical(self) -> Iterator[tuple[str, Errors]]:
        """Yield each tap's name and its medians over the vectors of the program."""
        yield from self._typical.items()

    def typical_factor(self, rule: Rule) -> float:
        """Return the multiple that medians over this program are held to."""
        assert rule.factor is not None
        assert rule.step_factor is not None
        return rule.factor if self.tokens >= FEW else rule.step_factor

    def judge(
        self, forward: int, name: str, ours: np.ndarray, theirs: np.ndarray, rule: Rule
    ) -> dict[str, object]:
        """Judge one comparable tensor: the numbers and the verdict of a Comparison."""
        assert rule.step_factor is not None
        assert rule.vector_factor is not None
        assert rule.ceiling is not None
        exact, typical = self._truth.tensors[forward, name], self._typical[name]
        errors = Errors(
            relative_rms(ours, exact),
            relative_rms(theirs, exact),
            max(float(self._roundings.rms[forward, name].max()), typical.rounding),
        )
        found: dict[str, object] = {
            "candidate_to_truth": errors.candidate,
            "oracle_to_truth": errors.oracle,
            "rounding_to_truth": errors.rounding,
            "candidate_to_oracle": relative_rms(ours, theirs),
            "max_abs": float(np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))),
            "bound": min(rule.step_factor * max(errors.oracle, errors.rounding), rule.ceiling),
        }
        same = False
        if ours.dtype == theirs.dtype and is_float(ours.dtype):
            found["max_ulp"] = int(ulp_distances(ours, theirs).max())
            same = same_bits_and_finite(ours, theirs)[0]
        wrong, detail = errors.beyond(rule.step_factor, rule.ceiling)
        if wrong is None:
            place, worst = self.worst_vector(forward, name)
            wrong, detail = worst.beyond(rule.vector_factor, np.inf)
            detail = f"at {list(place)}: {detail}"
        if wrong is None:
            return found | {"verdict": "identical" if same else "within"}
        return found | {"verdict": "exceeds", "wrong": wrong, "detail": detail}

    def worst_vector(self, forward: int, name: str) -> tuple[tuple[int, ...], Errors]:
        """Return the place and errors of the vector that needs the largest factor."""
        shape, typical = self._truth.tensors[forward, name].shape, self._typical[name]
        own, other = self._vectors[forward, name]
        rounding = np.maximum(self._roundings.vectors[forward, name].max(axis=0), typical.rounding)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num([own / np.maximum(other, rounding), other / rounding])
        at = int(shares.max(axis=0).argmax())
        place = tuple(int(i) for i in np.unravel_index(at, shape[:-1]))
        return place, Errors(float(own[at]), float(other[at]), float(rounding[at]))


def _typical(errors: np.ndarray) -> Errors:
    """Take the medians of [2 + grids, vectors]: candidate, oracle, and each grid."""
    medians = np.median(errors, axis=1)
    return Errors(float(medians[0]), float(medians[1]), float(medians[2:].max()))


def comparable(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether all have one shape and are finite."""
    return ours.shape == theirs.shape == exact.shape and all(
        all_finite(x) for x in (ours, theirs, exact)
    )
