"""Results of made-up runs, for the reports: one that holds, one that differs, one not run."""

from typing import Any

from parity.taps import FULL, LINEAR, all_taps, split

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`*_\x1b[31m\x00\u202e"
FIRST_TAP = "layers.3.self_attn.q_rope"
FAILING_CASE = "tiny/transformers/bfloat16/chunk-2"
LEFT_OUT = "transformers cannot load a checkpoint in mlx-lm's layout"
STEPS = ["prefill tokens 0:6", "prefill tokens 6:9", "decode token 9"]


def layer_types(layers: int = 7) -> list[str]:
    return [FULL if i % 4 == 3 else LINEAR for i in range(layers)]


def cell(name: str, verdict: str = "identical", **changes: Any) -> dict[str, Any]:
    layer, tap = split(name)
    return {
        "layer": layer,
        "tap": tap,
        "verdict": verdict,
        "step": 1,
        "compared": 3,
        "max_ulp": 0 if verdict == "identical" else 17,
        "max_abs": 0.0 if verdict == "identical" else 3.1e-5,
        "candidate_to_truth": None,
        "oracle_to_truth": None,
        "candidate_to_oracle": None,
        "bound": None,
        "attribution": None,
        "require": "identical",
        "reason": "the same operations in the same order",
        "detail": "",
    } | changes


def arbitrated(name: str, verdict: str, share: float) -> dict[str, Any]:
    return cell(
        name,
        verdict,
        candidate_to_truth=share * 4e-3,
        oracle_to_truth=2e-3,
        candidate_to_oracle=2.6e-3,
        bound=4e-3,
        require="arbitrated",
        reason="another summation order",
    )


def pair(cells: list[dict[str, Any]], feed: str = "free") -> dict[str, Any]:
    verdicts = [c["verdict"] for c in cells]
    compared = 3 * len(cells)
    failed = sum(v not in ("identical", "within") for v in verdicts)
    within = verdicts.count("within")
    return {
        "feed": feed,
        "compared": compared,
        "identical": compared - failed - within,
        "within": within,
        "failed": failed,
        "not_compared": None,
        "cells": cells,
    }


def left_out(reason: str = LEFT_OUT) -> dict[str, Any]:
    counts = {"compared": 0, "identical": 0, "within": 0, "failed": 0}
    return {"feed": None, **counts, "not_compared": reason, "cells": []}


def case(name: str, pairs: dict[str, Any], layers: int = 7) -> dict[str, Any]:
    parts = (name.split("/") + ["?"] * 4)[:4]
    keys = ("checkpoint", "generation", "dtype", "program")
    return {
        "name": name,
        **dict(zip(keys, parts, strict=True)),
        "steps": STEPS,
        "layer_types": layer_types(layers),
        "pairs": pairs,
    }


def result(cases: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for item in cases:
        for oracle, one in item["pairs"].items():
            total = totals.setdefault(
                oracle,
                {"compared": 0, "identical": 0, "within": 0, "failed": 0, "not_compared": []},
            )
            for key in ("compared", "identical", "within", "failed"):
                total[key] += one[key]
            if one["not_compared"]:
                total["not_compared"].append({"case": item["name"], "reason": one["not_compared"]})
    compared = sum(total["compared"] for total in totals.values())
    failed = sum(total["failed"] for total in totals.values())
    return {
        "schema": 1,
        "verdict": "not-run" if not compared else "differs" if failed else "holds",
        "compared": compared,
        "first_divergence": None,
        "pairs": totals,
        "environment": {
            "python": "3.11.7",
            "platform": "Linux-6.1-x86_64",
            "device": "cpu-x86_64",
            "mlx": "0.32.4",
            "mlx-lm": "0.32.2",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "switches": {"MLX_ENABLE_TF32": None, "MLX_GDN_PACKED": "1"},
        },
        "candidate": "impl",
        "seed": 0,
        "repeat": "parity run",
        "seconds": 103.2,
        "cases": cases,
    } | changes


def names(layers: int = 7) -> list[str]:
    return [name for name, _ in all_taps(layer_types(layers))]


def close_cells(layers: int = 7) -> list[dict[str, Any]]:
    """Cells against an arbitrated oracle: all within, at many sizes."""
    return [
        arbitrated(name, "within", ((7 * i) % 40 + 1) / 44) for i, name in enumerate(names(layers))
    ]


def holding() -> dict[str, Any]:
    return result(
        [
            case(
                f"tiny/{generation}/{dtype}/{program}",
                {
                    "mlx-lm": pair([cell(name) for name in names()]),
                    "transformers": left_out()
                    if generation == "mlx-lm"
                    else pair(close_cells(), "layer"),
                },
            )
            for generation in ("transformers", "mlx-lm")
            for dtype in ("float32", "bfloat16")
            for program in ("one-shot", "chunk-1", "chunk-2", "ragged", "rollback")
        ]
    )


def differing(layers: int = 7) -> dict[str, Any]:
    """From q_rope of layer 3 on, every verdict that fails is seen."""
    value = holding()
    cells, seen = [], False
    others = {5: "nonfinite", 11: "shape", 17: "dtype", 23: "missing"}
    for i, name in enumerate(names(layers)):
        seen = seen or name == FIRST_TAP
        verdict = others.get(i % 29, "exceeds") if seen else "within"
        if name == FIRST_TAP:
            verdict = "exceeds"
        cells.append(arbitrated(name, verdict, 1.7 if seen else (i % 40 + 1) / 44))
        if seen:
            cells[-1]["attribution"] = "makes" if name == FIRST_TAP else "carries"
            cells[-1]["detail"] = "first at [0, 1, 2]: 0.25, due 0.2500305; 9 of 96 elements differ"
    failing = case(FAILING_CASE, {"mlx-lm": left_out(), "transformers": pair(cells)}, layers)
    failing["pairs"]["mlx-lm"] = pair([cell(name) for name in names(layers)])
    cases = [failing if item["name"] == FAILING_CASE else item for item in value["cases"]]
    first = next(item for item in cells if item["attribution"] == "makes")
    return result(
        cases,
        first_divergence={
            **first,
            "case": FAILING_CASE,
            "oracle": "transformers",
            "step_label": STEPS[1],
            "tap": FIRST_TAP,
            "repeat": f"parity run --case {FAILING_CASE} --oracle transformers",
        },
        repeat="parity run --html report.html",
    )


def not_run(error: str = "MLX has no gpu device here") -> dict[str, Any]:
    return result([], candidate="", error=error)


def nothing_compared() -> dict[str, Any]:
    return result([case("tiny/mlx-lm/float32/one-shot", {"transformers": left_out()})])


def hostile(text: str = HOSTILE) -> dict[str, Any]:
    """A failing run whose every name is `text`."""
    bad = cell(f"layers.0.{text}", "exceeds", reason=text, detail=text)
    return result(
        [case(text, {text: pair([bad, cell(text)])}, 1)],
        first_divergence={
            **bad,
            "case": text,
            "oracle": text,
            "step_label": text,
            "tap": f"layers.0.{text}",
            "repeat": text,
        },
        environment={text: text},
        unknown_config_keys={text: [text] * 7},
        repeat=text,
        error=text,
    )
