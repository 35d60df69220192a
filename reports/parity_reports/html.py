"""The report as one self-contained HTML file: no network, strict CSP, hostile names inert."""

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from parity_reports.text import (
    Result,
    by_reason,
    clean,
    counted,
    divergence_lines,
    headline,
    json_safe,
    number,
    one_line,
    pairs,
)
from parity_reports.verdicts import (
    MEANING,
    PRETTY,
    SHORT_TYPE,
    column_groups,
    failing_first,
    fails,
    pair_state,
)

_FIELDS = (
    "layer",
    "tap",
    "verdict",
    "step",
    "compared",
    "max_ulp",
    "max_abs",
    "candidate_to_truth",
    "oracle_to_truth",
    "candidate_to_oracle",
    "rounding_to_truth",
    "bound",
    "attribution",
    "require",
    "reason",
    "detail",
)
_WORDS = frozenset(("tap", "verdict", "attribution", "require", "reason", "detail"))
_STATE_SYMBOL = {"fails": "≠", "within": "≈", "identical": "=", "none": "–"}


def render(result: Result) -> str:
    """Return the whole page."""
    result = clean(result)
    css, js = _asset("report.css"), _asset("report.js")
    verdict, said = headline(result)
    return _template().render(
        csp=_policy(css, js),
        css=Markup(css),
        js=Markup(js),
        data=Markup(_embedded(_data(result))),
        verdict=verdict,
        verdict_class=result.get("verdict", "not-run"),
        said=said,
        result=result,
        first=_first(result),
        oracles=list(_oracles(result)),
        environment=list(_environment(result)),
        seconds=number(result.get("seconds")),
    )


def _first(result: Result) -> dict[str, Any] | None:
    first = result.get("first_divergence")
    if not first:
        return None
    lines = dict(divergence_lines(first))
    tap = lines.pop("tap")
    return {"tap": tap, "lines": lines, "numbers": _numbers(first), "repeat": first.get("repeat")}


def _numbers(first: Result) -> list[tuple[str, str]]:
    names = {
        "candidate_to_truth": "candidate → truth",
        "oracle_to_truth": "oracle → truth",
        "candidate_to_oracle": "candidate → oracle",
        "rounding_to_truth": "rounding → truth",
        "bound": "bound",
        "max_ulp": "max ulp",
        "max_abs": "max abs",
    }
    return [(said, number(first[key])) for key, said in names.items() if first.get(key) is not None]


def _oracles(result: Result) -> Iterator[dict[str, Any]]:
    for name, pair in pairs(result).items():
        compared = pair.get("compared", 0)
        shares, start = [], 0.0
        for key in ("identical", "within", "failed"):
            count = pair.get(key, 0)
            width = 100 * count / compared if compared else 0.0
            # One failure in a million must still be seen.
            shares.append((key, f"{start:.3f}", f"{max(width, 0.6 if count else 0.0):.3f}"))
            start += width
        shares[-1] = ("failed", f"{100 - float(shares[-1][2]):.3f}", shares[-1][2])
        groups = by_reason(pair.get("not_compared"))
        yield {
            "name": name,
            "compared": f"{compared:,}",
            "counts": [(k, f"{pair.get(k, 0):,}") for k in ("identical", "within", "failed")],
            "failed": bool(pair.get("failed")),
            "empty": not compared,
            "shares": shares,
            "left_out": [(r, counted(len(c), "case"), c) for r, c in groups.items()],
        }


def _environment(result: Result) -> Iterator[tuple[str, str]]:
    for name, value in (result.get("environment") or {}).items():
        if name == "runners":
            for runner, facts in value.items():
                shown = (f"{k} {v}" for k, v in facts.items() if not isinstance(v, dict))
                yield runner, ", ".join(shown)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield key, "not set" if item is None else str(item)
        else:
            yield name, "-" if value is None else str(value)


def _data(result: Result) -> dict[str, Any]:
    """Return what the script draws from. Words that repeat in many cells stand in one table."""
    cases = failing_first(result.get("cases") or ())
    cells = [c for case in cases for pair in _case_pairs(case).values() for c in _cells(pair)]
    words: dict[str, int] = {}
    first = result.get("first_divergence")
    verdicts = dict.fromkeys([*PRETTY, *(str(cell.get("verdict")) for cell in cells)])
    return {
        "groups": [group.__dict__ for group in column_groups(cells)],
        "types": SHORT_TYPE,
        "verdicts": {
            v: {"symbol": PRETTY.get(v, "≠"), "meaning": MEANING.get(v, v), "fails": fails(v)}
            for v in verdicts
        },
        "states": _STATE_SYMBOL,
        "first": first and {key: first.get(key) for key in ("case", "oracle", "tap")},
        "fields": _FIELDS,
        "word_fields": sorted(_WORDS),
        "cases": [_case(case, words) for case in cases],
        "words": list(words),
    }


def _case_pairs(case: Result) -> dict[str, Result]:
    return case.get("pairs") or {}


def _cells(pair: Result) -> list[Result]:
    return pair.get("cells") or []


def _case(case: Result, words: dict[str, int]) -> dict[str, Any]:
    keys = ("name", "checkpoint", "generation", "dtype", "program", "steps", "layer_types")
    return {key: case.get(key) for key in keys} | {
        "pairs": {
            oracle: {
                "state": pair_state(pair),
                "feed": pair.get("feed"),
                "compared": pair.get("compared", 0),
                "failed": pair.get("failed", 0),
                "not_compared": pair.get("not_compared"),
                "cells": [_row(cell, words) for cell in _cells(pair)],
            }
            for oracle, pair in _case_pairs(case).items()
        }
    }


def _row(cell: Result, words: dict[str, int]) -> list[Any]:
    row = []
    for field in _FIELDS:
        value = cell.get(field)
        if field in _WORDS and value is not None:
            value = words.setdefault(str(value), len(words))
        elif isinstance(value, float):
            value = float(f"{value:.6g}")
        row.append(value)
    return row


def _embedded(value: Any) -> str:
    """Return JSON that cannot end its script element, nor open a comment in it."""
    text = json.dumps(json_safe(value), separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _policy(css: str, js: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (files("parity_reports") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["one_line"] = one_line
    return environment.from_string(_asset("template.html.j2"))
