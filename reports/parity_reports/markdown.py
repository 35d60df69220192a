"""The report as GitHub Markdown, for a job summary."""

import re
from collections.abc import Iterator, Sequence

from parity_reports.text import (
    Result,
    by_reason,
    clean,
    counted,
    divergence_lines,
    headline,
    number,
    one_line,
    pairs,
    three_numbers,
)
from parity_reports.verdicts import ASCII, fails, full_name

_CAP = 20
_ACTIVE = re.compile(r"[^\w \-.,;/]")


def render(result: Result) -> str:
    """Return the summary: verdict, first divergence, totals, failing tensors, what was left out."""
    result = clean(result)
    return "\n\n".join(part for part in _parts(result) if part) + "\n"


def escape(text: object) -> str:
    """Return text that Markdown, its tables and HTML all show as it is written."""
    flat = one_line(str(text))
    # An underscore is a word character to Python and emphasis to Markdown.
    return _ACTIVE.sub(lambda m: f"&#{ord(m[0])};", flat).replace("_", "&#95;")


def _parts(result: Result) -> Iterator[str]:
    verdict, said = headline(result)
    yield f"## Qwen3.5 parity: {escape(verdict.lower())}"
    yield f"**{escape(said)}**"
    if result.get("error"):
        yield f"Why: {escape(result['error'])}"
    if first := result.get("first_divergence"):
        yield "### First divergence"
        yield _table(("", ""), [(label, _code(text)) for label, text in _facts(first)])
        yield _fence(first.get("repeat"))
    if pairs(result):
        yield "### Oracles"
        yield _totals(result)
    yield _failing(result)
    yield _not_compared(result)
    if not first:
        yield _fence(result.get("repeat"))


def _facts(first: Result) -> list[tuple[str, str]]:
    return divergence_lines(first) + three_numbers(first)


def _code(text: object) -> str:
    return f"<code>{escape(text)}</code>"


def _fence(command: object) -> str:
    if not command:
        return ""
    text = one_line(str(command))
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}sh\n{text}\n{ticks}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _totals(result: Result) -> str:
    head = ("oracle", "compared", "identical", "within", "failed", "cases not compared")
    rows = [
        (
            _code(oracle),
            *(number(pair.get(key, 0)) for key in ("compared", "identical", "within", "failed")),
            number(len(pair.get("not_compared") or ())),
        )
        for oracle, pair in pairs(result).items()
    ]
    return _table(head, rows)


def _failing(result: Result) -> str:
    found = [
        (case, oracle, cell)
        for case in result.get("cases") or ()
        for oracle, pair in (case.get("pairs") or {}).items()
        for cell in pair.get("cells") or ()
        if fails(str(cell.get("verdict")))
    ]
    if not found:
        return ""
    head = ("tensor", "verdict", "max ulp", "max abs", "case", "oracle")
    rows = [
        (
            _code(full_name(cell)),
            f"{escape(ASCII.get(str(cell.get('verdict')), 'X'))} {escape(cell.get('verdict'))}",
            number(cell.get("max_ulp")),
            number(cell.get("max_abs")),
            _code(case.get("name")),
            _code(oracle),
        )
        for case, oracle, cell in found[:_CAP]
    ]
    more = f"\n\nand {len(found) - _CAP:,} more." if len(found) > _CAP else ""
    return f"### Failing tensors ({len(found):,})\n\n{_table(head, rows)}{more}"


def _not_compared(result: Result) -> str:
    lines = []
    for oracle, pair in pairs(result).items():
        groups = by_reason(pair.get("not_compared"))
        if not groups and not pair.get("compared"):
            groups = {"no reason given": []}
        for reason, cases in groups.items():
            names = ", ".join(map(_code, cases[:3]))
            more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
            said = f"{counted(len(cases), 'case')}, {escape(reason)}: {names}{more}"
            lines.append(f"- {_code(oracle)}: {said if cases else escape(reason)}")
    return "### Not compared\n\n" + "\n".join(lines) if lines else ""
