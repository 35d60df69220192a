"""Programs, drawn as plain lists of steps in dependency order and without filters."""

from typing import Any

from hypothesis import strategies as st
from tiny_models import NAN_ID

Steps = list[dict[str, Any]]
WIDEST = 9
"""Tokens a row of a prefill: padding can be longer than a conv kernel of 4 and than a chunk."""
MOST_ROWS = 4
PADDING = (0, NAN_ID, 10**9, -1)

TOKENS = st.integers(0, NAN_ID - 1)


@st.composite
def ids(draw: st.DrawFn, rows: int, tokens: int) -> list[list[int]]:
    """Draw rows of equal length."""
    drawn = draw(st.lists(TOKENS, min_size=rows * tokens, max_size=rows * tokens))
    return [drawn[r * tokens : (r + 1) * tokens] for r in range(rows)]


@st.composite
def prefills(
    draw: st.DrawFn, rows: int, ragged: bool | None = None, width: int | None = None
) -> dict[str, Any]:
    """Draw a prefill, with or without chunks and lengths (`ragged` None: either)."""
    tokens = draw(st.integers(1, WIDEST)) if width is None else width
    step: dict[str, Any] = {"op": "prefill", "ids": draw(ids(rows, tokens))}
    if draw(st.booleans()) if ragged is None else ragged:
        step["lengths"] = draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows))
        step = padded(step, draw(st.sampled_from(PADDING)))
    if draw(st.booleans()):
        step["chunk"] = draw(st.integers(1, tokens))
    return step


def padded(step: dict[str, Any], content: int) -> dict[str, Any]:
    """Return a ragged prefill with other ids as padding."""
    rows = zip(step["ids"], step["lengths"], strict=True)
    return step | {"ids": [row[:n] + [content] * (len(row) - n) for row, n in rows]}


@st.composite
def rounds(draw: st.DrawFn, rows: int) -> Steps:
    """Draw a verify and its accept: of none, of all, of what is less than a conv window, …"""
    tokens = draw(st.integers(1, 6))
    count = st.integers(0, tokens)
    keep = draw(count | st.lists(count, min_size=rows, max_size=rows))
    return [{"op": "verify", "ids": draw(ids(rows, tokens))}, {"op": "accept", "keep": keep}]


@st.composite
def appending(draw: st.DrawFn, rows: int) -> Steps:
    """Draw steps that leave the rows where they are."""
    kind = draw(st.sampled_from(["decode", "round", "prefill"]))
    if kind == "prefill":
        return [draw(prefills(rows))]
    if kind == "round":
        return draw(rounds(rows))
    return [{"op": "decode", "ids": draw(ids(rows, 1))}]


@st.composite
def programs(
    draw: st.DrawFn, rows: int | None = None, width: int | None = None, depth: int = 1
) -> Steps:
    """Draw a program: tokens first, then anything; at most MOST_ROWS rows at any time.

    `rows` and `width` fix those of the first forward. With a `depth`, rows of other programs join.
    """
    count = draw(st.sampled_from([1, 2, MOST_ROWS])) if rows is None else rows
    steps = draw(first(count, width))
    saved: dict[str, int] = {}
    for _ in range(draw(st.integers(0, 5))):
        kinds = ["append", "append", "filter", "extract", "snapshot", "there and back"]
        kinds += ["restore"] * bool(saved) + ["extend"] * (depth > 0 and count < MOST_ROWS)
        kind = draw(st.sampled_from(kinds))
        if kind == "append":
            steps += draw(appending(count))
        elif kind == "filter":
            order = draw(st.permutations(range(count)))
            chosen = order[: draw(st.integers(1, count))]
            steps.append({"op": "filter", "rows": chosen})
            count = len(chosen)
        elif kind == "extract":
            steps.append({"op": "extract", "row": draw(st.integers(0, count - 1))})
            count = 1
        elif kind == "snapshot":
            name = draw(st.sampled_from("abc"))
            steps.append({"op": "snapshot", "name": name})
            saved[name] = count
        elif kind == "there and back":
            there = {"op": "snapshot", "name": "c"}
            steps += [there, *draw(appending(count)), {"op": "restore", "name": "c"}]
            saved["c"] = count
        elif kind == "restore":
            name = draw(st.sampled_from(sorted(saved)))
            steps.append({"op": "restore", "name": name})
            count = saved[name]
        else:
            more = draw(st.integers(1, MOST_ROWS - count))
            inner = draw(first(more, None)) + draw(appending(more))
            steps.append({"op": "extend", "program": inner})
            count += more
    return steps


@st.composite
def first(draw: st.DrawFn, rows: int, width: int | None) -> Steps:
    """Draw the steps that have the first tokens: a prefill, or a round of the first ever."""
    if width is None and draw(st.booleans()):
        return draw(rounds(rows))
    return [draw(prefills(rows, width=width))]


@st.composite
def appending_programs(draw: st.DrawFn, rows: int) -> Steps:
    """Draw a program that only appends and rolls back: its rows stay where they are."""
    steps = draw(first(rows, None))
    for _ in range(draw(st.integers(0, 3))):
        steps += draw(appending(rows))
    return steps


@st.composite
def rollbacks(draw: st.DrawFn) -> Steps:
    """Draw rollbacks in a row, after a prompt or of the first tokens ever, and a decode."""
    rows = draw(st.integers(1, MOST_ROWS))
    steps = [draw(prefills(rows))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(2, 3))):
        steps += draw(rounds(rows))
    return [*steps, {"op": "decode", "ids": draw(ids(rows, 1))}]


@st.composite
def partitions(draw: st.DrawFn, total: int) -> list[int]:
    """Draw the widths of parts that make `total`."""
    cuts = draw(st.sets(st.integers(1, total - 1))) if total > 1 else set()
    ends = [*sorted(cuts), total]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
