"""The report on a terminal: readable at 80 columns, without colour and in ASCII logs."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parity_reports.text import (
    Result,
    by_reason,
    clean,
    counted,
    divergence_lines,
    headline,
    number,
    pairs,
    three_numbers,
)
from parity_reports.verdicts import ASCII, KIND, MEANING, SHORT_TYPE, fails, worst

_STYLE = {"HOLDS": "bold blue", "DIFFERS": "bold red", "NOT RUN": "bold yellow"}
_KINDS = {
    "norm": "norm",
    "projection": "proj",
    "convolution": "conv",
    "qk_norm": "qk",
    "gate": "gate",
    "recurrence": "recur",
    "gated_norm": "gnorm",
    "rope": "rope",
    "attention": "attn",
    "exact": "exact",
    "mlp_act": "mlp",
    "residual": "resid",
}
_FEW_LAYERS = 24


def render(result: Result, console: Console) -> None:
    """Print the report: verdict and first divergence first, then totals, then the layer map."""
    result = _encodable(clean(result), console.encoding)
    _print_headline(result, console)
    if first := result.get("first_divergence"):
        _print_divergence(first, console)
    if pairs(result):
        console.print()
        console.print(_totals(result))
    _print_not_compared(result, console)
    _print_unknown_keys(result, console)
    if cells := list(_chosen(result)):
        _print_map(result, cells, console)
    if result.get("repeat") and not first:
        console.print()
        _print_command("again", str(result["repeat"]), console)


def _encodable(value: Any, encoding: str) -> Any:
    """Spell out what the terminal's encoding has no byte for, instead of failing on it."""
    if isinstance(value, str):
        return value.encode(encoding, "backslashreplace").decode(encoding)
    if isinstance(value, dict):
        return {_encodable(key, encoding): _encodable(v, encoding) for key, v in value.items()}
    return [_encodable(item, encoding) for item in value] if isinstance(value, list) else value


def _print_headline(result: Result, console: Console) -> None:
    verdict, said = headline(result)
    console.print(Text.assemble((verdict, _STYLE.get(verdict, "bold")), "  ", said))
    if result.get("error"):
        console.print(Padding(Text(f"why: {result['error']}"), (0, 0, 0, 2)))
    if not pairs(result):
        return
    judged = f"{result.get('candidate') or '?'} against {', '.join(pairs(result))}"
    seconds = f"; {float(result['seconds']):.1f} s" if result.get("seconds") is not None else ""
    console.print(Text(f"{judged}; seed {result.get('seed', '?')}{seconds}", style="dim"))


def _print_divergence(first: Result, console: Console) -> None:
    console.print()
    console.print(Text("First divergence", style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in divergence_lines(first):
        table.add_row(f"  {label}", Text(value, style="bold" if label == "tap" else ""))
    if numbers := three_numbers(first):
        said = "; ".join(f"{name} {value}" for name, value in numbers)
        table.add_row("  errors", Text(said))
    console.print(table)
    if first.get("repeat"):
        _print_command("  again", str(first["repeat"]), console)


def _print_command(label: str, command: str, console: Console) -> None:
    # Unwrapped, so that it can be copied whole.
    text = Text.assemble((label, "dim"), "   ", (command, "bold"))
    console.print(text, soft_wrap=True)


def _totals(result: Result) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("oracle", overflow="fold")
    for name in ("compared", "identical", "within", "failed", "not compared"):
        table.add_column(name, justify="right", no_wrap=True)
    for oracle, pair in pairs(result).items():
        failed, left_out = pair.get("failed", 0), len(pair.get("not_compared") or ())
        table.add_row(
            Text(oracle),
            *(number(pair.get(key, 0)) for key in ("compared", "identical", "within")),
            Text(number(failed), style="bold red" if failed else ""),
            Text(counted(left_out, "case"), style="yellow") if left_out else Text("-"),
        )
    return table


def _print_not_compared(result: Result, console: Console) -> None:
    for oracle, pair in pairs(result).items():
        groups = by_reason(pair.get("not_compared"))
        if not groups and not pair.get("compared"):
            groups = {"no reason given": []}
        if groups:
            console.print()
            console.print(Text(f"Not compared with {oracle}", style="bold"))
        for reason, cases in groups.items():
            shown = ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")
            said = f"{counted(len(cases), 'case')}: {reason}" if cases else reason
            console.print(Padding(Text(said), (0, 0, 0, 2)))
            if shown:
                console.print(Padding(Text(shown, style="dim", overflow="fold"), (0, 0, 0, 4)))


def _print_unknown_keys(result: Result, console: Console) -> None:
    for model, keys in (result.get("unknown_config_keys") or {}).items():
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        said = f"config.json of {model}: nothing here reads {', '.join(keys[:5])}{more}"
        console.print(Text(said, style="yellow", overflow="fold"))


def _chosen(result: Result) -> Iterator[tuple[Result, Result]]:
    """Yield (case, cell) of the first divergence's case and oracle, else of all of them."""
    first = result.get("first_divergence")
    for case in result.get("cases") or ():
        for oracle, pair in (case.get("pairs") or {}).items():
            if first and (case.get("name"), oracle) != (first.get("case"), first.get("oracle")):
                continue
            for cell in pair.get("cells") or ():
                yield case, cell


def _print_map(result: Result, cells: list[tuple[Result, Result]], console: Console) -> None:
    first = result.get("first_divergence")
    whose = f"{first['case']} against {first['oracle']}" if first else "worst over all cases"
    console.print()
    console.print(Text("Layers by kind of operation", style="bold"))
    console.print(Text(whose, style="dim", overflow="fold"))
    table, left_out = _layer_table(cells, first)
    console.print(table)
    if left_out:
        console.print(Text(f"{counted(left_out, 'layer')} without a failure not shown"))
    rest = [cell for _, cell in cells if cell.get("layer") is None]
    line = Text()
    for name in dict.fromkeys(str(cell.get("tap")) for cell in rest):
        mark = _mark([c for c in rest if str(c.get("tap")) == name], first, None)
        line.append(f"{name} ").append(mark).append("   ")
    console.print(line)
    used = {str(cell.get("verdict")) for _, cell in cells}
    legend = [f"{ASCII[v]}   {MEANING[v]}" for v in ASCII if v in used]
    legend += ["X3  in 3 taps of that kind"] if any(map(fails, used)) else []
    legend += [">   first divergence"] if first else []
    console.print(Text("\n".join(legend), style="dim"))


def _layer_table(cells: list[tuple[Result, Result]], first: Result | None) -> tuple[Table, int]:
    types: dict[int, set[str]] = {}
    marks: dict[int, dict[str, list[Result]]] = {}
    for case, cell in cells:
        if (layer := cell.get("layer")) is None:
            continue
        names = case.get("layer_types") or ()
        known = names[layer] if 0 <= layer < len(names) else "?"
        types.setdefault(layer, set()).add(SHORT_TYPE.get(known, known))
        kind = KIND.get(str(cell.get("tap")), "other")
        marks.setdefault(layer, {}).setdefault(kind, []).append(cell)
    present = {kind for row in marks.values() for kind in row}
    kinds = [kind for kind in (*_KINDS, "other") if kind in present]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("layer", no_wrap=True)
    for kind in kinds:
        table.add_column(_KINDS.get(kind, kind), justify="center", no_wrap=True)
    shown = [i for i in sorted(marks) if len(marks) <= _FEW_LAYERS or _row_fails(marks[i])]
    for layer in shown:
        row = (_mark(marks[layer].get(kind, []), first, layer) for kind in kinds)
        table.add_row(Text(f"{layer:>2} {'/'.join(sorted(types[layer]))}"), *row)
    return table, len(marks) - len(shown)


def _row_fails(row: dict[str, list[Result]]) -> bool:
    return any(fails(str(cell.get("verdict"))) for cells in row.values() for cell in cells)


def _mark(cells: Iterable[Result], first: Result | None, layer: int | None) -> Text:
    """Return the worst verdict's symbol, the number of failing taps, `>` at the first."""
    cells = list(cells)
    verdict = worst(str(cell.get("verdict")) for cell in cells)
    if verdict is None:
        return Text("")
    failing = {str(cell.get("tap")) for cell in cells if fails(str(cell.get("verdict")))}
    style = "bold red" if failing else "cyan" if verdict == "within" else "dim"
    prefix = "" if layer is None else f"layers.{layer}."
    here = first is not None and first.get("tap") in {prefix + tap for tap in failing}
    count = str(len(failing)) if len(failing) > 1 else ""
    return Text(f"{'>' if here else ''}{ASCII.get(verdict, 'X')}{count}", style=style)
