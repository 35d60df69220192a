"""Policies: what a candidate must meet against an oracle, for each kind of tap."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from parity.taps import LAYER_TAPS, all_taps
from qwen35.errors import InputError

SCHEMA = 1
DEFAULT = Path(__file__).with_name("policy.toml")
Require = Literal["identical", "ulp", "arbitrated"]
MOST_ULP = 16
"""As far as MLX's exp and sigmoid are off on a CPU. 16 ulp are up to 12 % in bfloat16."""
_KINDS = {tap.kind for _, tap in all_taps(tuple(LAYER_TAPS))} | {"*"}


class PolicyError(InputError):
    """A policy file that cannot be used."""


@dataclass(frozen=True)
class Rule:
    """What taps of these kinds must meet.

    `identical`: the same dtype and bits. `ulp`: the same dtype and at most `ulp` floats apart.
    `arbitrated`: an error against float64 of at most so many times the oracle's own, or what
    rounding alone makes at that place where that is larger: `factor` for the typical error over
    the program, `step_factor` for that of one forward, `vector_factor` for that of one vector; the
    first two never more than `ceiling`. The oracle may use another dtype.
    """

    kinds: tuple[str, ...]
    require: Require
    reason: str
    factor: float | None = None
    step_factor: float | None = None
    vector_factor: float | None = None
    ceiling: float | None = None
    ulp: int | None = None


@dataclass(frozen=True)
class Pair:
    """The rules for one candidate, oracle and dtype, and how the candidate's layers are fed."""

    feed: Literal["free", "layer"]
    rules: tuple[Rule, ...]

    @property
    def arbitrated(self) -> bool:
        """Whether any rule needs the float64 truth."""
        return any(rule.require == "arbitrated" for rule in self.rules)

    def rule(self, kind: str) -> Rule:
        """Return the first rule for taps of this kind."""
        return next(r for r in self.rules if kind in r.kinds or "*" in r.kinds)


@dataclass(frozen=True)
class Policy:
    """All pairs of a policy file."""

    source: str
    pairs: tuple[tuple[frozenset[str], frozenset[str], frozenset[str], Pair], ...]

    def pair(self, candidate: str, oracle: str, dtype: str) -> Pair | None:
        """Return the first pair that fits, or None where the policy says nothing."""
        for candidates, oracles, dtypes, pair in self.pairs:
            if _fits(candidate, candidates) and _fits(oracle, oracles) and dtype in dtypes:
                return pair
        return None


def _fits(name: str, patterns: frozenset[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def load(path: str | Path = DEFAULT) -> Policy:
    """Read a policy file. Raises PolicyError naming the file, the place and the remedy."""
    try:
        value = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: cannot be read ({error}). Give a TOML policy file.") from None
    if type(value.get("schema")) is not int or value["schema"] != SCHEMA:
        raise PolicyError(
            f"{path}: schema is {value.get('schema')!r}. This version reads {SCHEMA}."
        )
    try:
        pairs = tuple(_pair(entry) for entry in value["pair"])
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path}: {error}. Compare with the policy.toml shipped here.") from None
    return Policy(str(path), pairs)


def _pair(
    entry: dict[str, Any],
) -> tuple[frozenset[str], frozenset[str], frozenset[str], Pair]:
    if unknown := set(entry) - {"candidate", "oracle", "dtypes", "feed", "rule"}:
        raise ValueError(f"a pair has unknown keys {', '.join(sorted(unknown))}")
    if entry["feed"] not in ("free", "layer"):
        raise ValueError(f"feed is {entry['feed']!r}, not free or layer")
    rules = tuple(_rule(rule) for rule in entry["rule"])
    kinds = {kind for rule in rules for kind in rule.kinds}
    if "*" not in kinds and (uncovered := _KINDS - {"*"} - kinds):
        raise ValueError(f"no rule for taps of kind {', '.join(sorted(uncovered))}")
    for key in ("candidate", "oracle", "dtypes"):
        value = entry[key]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{key} is {value!r}, no list of names")
    names = (frozenset(entry[key]) for key in ("candidate", "oracle", "dtypes"))
    return (*names, Pair(entry["feed"], rules))  # type: ignore[return-value]


def _rule(entry: dict[str, Any]) -> Rule:
    rule = Rule(**{**entry, "kinds": tuple(entry["kinds"])})
    if unknown := set(rule.kinds) - _KINDS:
        raise ValueError(f"unknown kinds {', '.join(sorted(unknown))}")
    if not isinstance(rule.reason, str) or not rule.reason.strip():
        raise ValueError(f"the rule for {', '.join(rule.kinds)} gives no reason")
    factors = (rule.factor, rule.step_factor, rule.vector_factor)
    relaxed = (*factors, rule.ceiling)
    limits = {
        "identical": rule.ulp is None and set(relaxed) == {None},
        "ulp": type(rule.ulp) is int and 0 <= rule.ulp <= MOST_ULP and set(relaxed) == {None},
        "arbitrated": rule.ulp is None
        and all(isinstance(f, float) and 1.0 <= f <= 100.0 for f in factors[:2])
        and isinstance(rule.vector_factor, float)
        and 1.0 <= rule.vector_factor <= 1000.0
        and isinstance(rule.ceiling, float)
        and 0.0 < rule.ceiling < 1.0,
    }
    if not limits.get(rule.require, False):
        raise ValueError(
            f"the rule for {', '.join(rule.kinds)} requires {rule.require!r} with factor "
            f"{rule.factor!r}, step_factor {rule.step_factor!r}, vector_factor "
            f"{rule.vector_factor!r}, ceiling {rule.ceiling!r} and ulp {rule.ulp!r}; due is "
            f"identical alone, ulp with a whole number up to {MOST_ULP}, or arbitrated with "
            "factors from 1.0 to 100.0 (for vectors 1000.0) and a ceiling below 1.0"
        )
    return rule
