"""The result of a run as JSON: the contract that bots and reports read."""

import platform
from collections import Counter
from typing import Any

from parity.commands import EXIT_CODES
from parity.compare import FAILED, Comparison
from parity.program import Moment
from parity.run import CaseResult, PairResult, RunResult
from parity.taps import split
from qwen35.config import unknown_keys

SCHEMA = 1
_SEVERITY = {"identical": 0, "within": 1} | {verdict: 2 + i for i, verdict in enumerate(FAILED)}


def to_json(result: RunResult, repeat: str, seed: int) -> dict[str, Any]:
    """Return the result as plain JSON values. `repeat` is the command that runs all of it again."""
    pairs = {oracle: _pair_totals(result, oracle) for oracle in result.oracles}
    compared = sum(pair["compared"] for pair in pairs.values())
    failed = sum(pair["failed"] for pair in pairs.values())
    return {
        "schema": SCHEMA,
        "verdict": "not-run" if not compared else "differs" if failed else "holds",
        "compared": compared,
        "first_divergence": _first_divergence(result),
        "pairs": pairs,
        "environment": _environment(result),
        "unknown_config_keys": _unknown(result),
        "repeat": repeat,
        "candidate": result.candidate,
        "seed": seed,
        "seconds": round(result.seconds, 3),
        "cases": [_case(case) for case in result.cases],
    }


def not_run(repeat: str, error: str) -> dict[str, Any]:
    """Return the result of a run that ended before anything was compared."""
    empty = RunResult("", ())
    return to_json(empty, repeat, 0) | {"error": error}


def exit_code(value: dict[str, Any]) -> int:
    """Return 0 holds, 1 differs, 5 nothing was compared."""
    key = "nothing compared" if value["verdict"] == "not-run" else value["verdict"]
    return EXIT_CODES[key]


def _unknown(result: RunResult) -> dict[str, list[str]]:
    """Return model -> the keys of its config.json that nothing here reads, where it has any."""
    models = {f"{c.target.label}/{c.target.generation}": c.target for c in result.cases}
    keys = {name: list(unknown_keys(target.checkpoint.config)) for name, target in models.items()}
    return {name: found for name, found in keys.items() if found}


def _pair_totals(result: RunResult, oracle: str) -> dict[str, Any]:
    pairs = [(case.name, case.pairs[oracle]) for case in result.cases]
    totals: Counter[str] = Counter()
    for _, pair in pairs:
        totals.update(_counts(pair))
    keys = ("compared", "identical", "within", "failed")
    return {key: totals[key] for key in keys} | {
        "not_compared": [
            {"case": name, "reason": pair.not_compared}
            for name, pair in pairs
            if pair.not_compared is not None
        ]
    }


def _counts(pair: PairResult) -> dict[str, int]:
    verdicts = Counter(c.verdict for c in pair.comparisons)
    return {
        "compared": len(pair.comparisons),
        "identical": verdicts["identical"],
        "within": verdicts["within"],
        "failed": sum(verdicts[verdict] for verdict in FAILED),
    }


def _first_divergence(result: RunResult) -> dict[str, Any] | None:
    for case in result.cases:
        for oracle, pair in case.pairs.items():
            for item in pair.comparisons:
                if item.failed:
                    return _divergence(case, oracle, item)
    return None


def _divergence(case: CaseResult, oracle: str, item: Comparison) -> dict[str, Any]:
    steps = step_labels(case)
    return {
        "case": case.name,
        "oracle": oracle,
        "step": item.forward,
        "step_label": steps[item.forward] if 0 <= item.forward < len(steps) else "",
        "tap": item.tap,
        "row": item.row,
        "verdict": item.verdict,
        "max_ulp": item.max_ulp,
        "max_abs": item.max_abs,
        "attribution": item.attribution,
        "candidate_to_truth": item.candidate_to_truth,
        "oracle_to_truth": item.oracle_to_truth,
        "candidate_to_oracle": item.candidate_to_oracle,
        "rounding_to_truth": item.rounding_to_truth,
        "wrong": item.wrong,
        "bound": item.bound,
        "require": item.require,
        "reason": item.reason,
        "detail": item.detail,
        "repeat": case.target.repeat.format(program=case.program_name) + f" --oracle {oracle}",
    }


def step_labels(case: CaseResult) -> list[str]:
    """Return what each moment of the program does, in words."""
    if not case.program.is_plain:
        return [_label(moment) for moment in case.program.moments()]
    labels, at = [], 0
    for _, op, ids in case.program.forwards():
        tokens = ids.shape[1]
        labels.append(f"{op} tokens {at}:{at + tokens}" if op == "prefill" else f"{op} token {at}")
        at += tokens
    return labels


def _label(moment: Moment) -> str:
    step = moment.step
    if moment.is_forward:
        counts = sorted(set(moment.tokens.tolist()))
        return f"{step.op} {' or '.join(map(str, counts))} tokens a row"
    if step.op == "extend":
        return "extend by " + ", ".join(inner.op for inner in step.program)
    of = {"accept": step.keep, "filter": step.rows, "extract": step.row}.get(step.op, step.name)
    return f"{step.op} {' '.join(map(str, of)) if isinstance(of, tuple) else of}"


def _case(case: CaseResult) -> dict[str, Any]:
    target = case.target
    return {
        "name": case.name,
        "checkpoint": target.label,
        "generation": target.generation,
        "dtype": target.dtype,
        "program": case.program_name,
        "steps": step_labels(case),
        "layer_types": list(case.layer_types),
        "pairs": {
            oracle: {"feed": pair.feed, "not_compared": pair.not_compared}
            | _counts(pair)
            | {"cells": _cells(pair.comparisons)}
            for oracle, pair in case.pairs.items()
        },
    }


def _cells(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """Fold the forwards of each tap into its worst: the first failure, else the largest error."""
    taps: dict[str, list[Comparison]] = {}
    for item in comparisons:
        taps.setdefault(item.tap, []).append(item)
    cells = []
    for name, items in taps.items():
        worst = max(items, key=lambda c: (_SEVERITY[c.verdict], not c.failed, _size(c)))
        first = next((c for c in items if c.failed), worst)
        layer, tap = split(name)
        cells.append(
            {
                "layer": layer,
                "tap": tap,
                "verdict": worst.verdict,
                "step": first.forward,
                "compared": len(items),
                "max_ulp": first.max_ulp,
                "max_abs": first.max_abs,
                "candidate_to_truth": first.candidate_to_truth,
                "oracle_to_truth": first.oracle_to_truth,
                "candidate_to_oracle": first.candidate_to_oracle,
                "rounding_to_truth": first.rounding_to_truth,
                "wrong": first.wrong,
                "bound": first.bound,
                "attribution": first.attribution,
                "require": first.require,
                "reason": first.reason,
                "detail": first.detail,
            }
        )
    return cells


def _size(item: Comparison) -> float:
    if item.bound and item.candidate_to_truth is not None:
        return item.candidate_to_truth / item.bound
    return item.max_abs or 0.0


def _environment(result: RunResult) -> dict[str, Any]:
    merged: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts = {
        runner: {key: value for key, value in info.items() if key not in ("dtype", "weights")}
        for runner, info in result.info.items()
    }
    # Runners may differ in their versions: those of the candidate stand for the whole.
    for runner in sorted(facts, key=lambda name: name == result.candidate):
        merged |= facts[runner]
    return merged | {"runners": facts}
