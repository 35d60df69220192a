"""Words and numbers that every report shares, made safe to show."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
"""A finished run as plain JSON values (schema 1). Unknown fields are let be."""

_HEADLINES = {"holds": "HOLDS", "differs": "DIFFERS", "not-run": "NOT RUN"}
_ATTRIBUTION = {
    "makes": "makes the difference: its inputs agree bit for bit, its result does not",
    "carries": "carries the difference: one of its inputs already fails",
}
_WRONG = {
    "oracle": "the oracle is too far from float64, the candidate is not",
    "both": "candidate and oracle are both too far from float64",
}
_UNDECIDED = "undecided: its inputs differ within their bounds, or were not compared"


def clean(value: Any) -> Any:
    """Return plain values in which every string can be shown in any report."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def printable(text: str) -> str:
    """Spell out control characters, surrogates and invisible format characters.

    They would break XML, colour or overwrite a terminal, or reorder what is read.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"} and char != "\n"
        else char
        for char in text
    )


def one_line(text: str) -> str:
    """Return `text` with its line breaks spelled out."""
    return text.replace("\n", "\\n")


def number(value: Any) -> str:
    """Return a measured number to three digits, or `-` where nothing was measured."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def json_safe(value: Any) -> Any:
    """Return `value` with NaN and infinities as strings, which JSON has no numbers for.

    The strings are those that both Python's float() and JavaScript's Number() read.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def headline(result: Result) -> tuple[str, str]:
    """Return the verdict in capitals and a sentence that says what it rests on."""
    verdict = result.get("verdict", "not-run")
    compared = result.get("compared", 0)
    left_out = sum(len(pair.get("not_compared") or ()) for pair in pairs(result).values())
    if verdict == "not-run":
        said = "Nothing was compared, so nothing is shown: this is no pass."
    elif verdict == "differs":
        failed = sum(pair.get("failed", 0) for pair in pairs(result).values())
        said = f"{failed:,} of {counted(compared, 'comparison')} fail."
    else:
        said = f"{counted(compared, 'comparison')}, each as the policy requires."
    if left_out and verdict != "not-run":
        said += f" Not compared: {counted(left_out, 'case')}."
    return _HEADLINES.get(verdict, str(verdict).upper()), said


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, in the plural where due."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def pairs(result: Result) -> Mapping[str, Any]:
    """Return the totals of each oracle."""
    return result.get("pairs") or {}


def divergence_lines(first: Result) -> list[tuple[str, str]]:
    """Say where the first divergence is, what was seen, what was due, and who makes it."""
    step, label = first.get("step"), first.get("step_label")
    return [
        ("tap", str(first.get("tap", ""))),
        ("case", str(first.get("case", ""))),
        ("oracle", str(first.get("oracle", ""))),
        ("step", f"{step} ({label})" if label else str(step)),
        ("seen", _seen(first)),
        ("due", due(first)),
        (
            "blame",
            _WRONG.get(first.get("wrong") or "")
            or _ATTRIBUTION.get(first.get("attribution") or "", _UNDECIDED),
        ),
    ]


def _seen(first: Result) -> str:
    parts = [str(first.get("verdict", ""))]
    if first.get("max_ulp") is not None:
        parts.append(f"max {number(first['max_ulp'])} ulp")
    if first.get("max_abs") is not None:
        parts.append(f"max abs {number(first['max_abs'])}")
    if first.get("detail"):
        parts.append(str(first["detail"]))
    return "; ".join(parts)


def due(item: Result) -> str:
    """Say what the policy requires of a comparison, and why."""
    require, bound = item.get("require"), item.get("bound")
    if require == "arbitrated" or (require is None and bound is not None):
        said = "error against float64"
        said += " within its bound" if bound is None else f" at most {number(bound)}"
    elif require == "ulp":
        said = "a distance in ulp that the policy allows"
    elif require == "identical" or require is None:
        said = "identical, bit for bit"
    else:
        said = str(require)
    return f"{said} ({item['reason']})" if item.get("reason") else said


def three_numbers(item: Result) -> list[tuple[str, str]]:
    """Return the errors (relative RMS) and the bound, those that were measured."""
    names = {
        "candidate_to_truth": "candidate to truth",
        "oracle_to_truth": "oracle to truth",
        "candidate_to_oracle": "candidate to oracle",
        "rounding_to_truth": "rounding to truth",
        "bound": "bound",
    }
    return [(said, number(item[key])) for key, said in names.items() if item.get(key) is not None]


def by_reason(not_compared: Sequence[Result] | None) -> dict[str, list[str]]:
    """Group the cases that were not compared by their reason."""
    groups: dict[str, list[str]] = {}
    for item in not_compared or ():
        groups.setdefault(str(item.get("reason") or "no reason given"), []).append(
            str(item.get("case", ""))
        )
    return groups
