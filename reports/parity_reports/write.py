"""Writing reports to files, each whole or not at all."""

import json as json_format
from collections.abc import Callable
from pathlib import Path

from parity.whole_file import append as add_to
from parity.whole_file import replace
from parity_reports.text import Result, json_safe


def write(
    result: Result,
    *,
    html: Path | None = None,
    markdown: Path | None = None,
    junit: Path | None = None,
    json: Path | None = None,
    append: bool = False,
) -> None:
    """Write the reports that have a path.

    `append` adds the Markdown to the end of its file, as GitHub's step summary wants it; the others
    are always replaced. Raises InputError where a file cannot be written.
    """
    from parity_reports import html as html_report
    from parity_reports import junit as junit_report
    from parity_reports import markdown as markdown_report

    reports: list[tuple[Path | None, Callable[[Result], str]]] = [
        (json, _json),
        (junit, junit_report.render),
        (html, html_report.render),
    ]
    for path, render in reports:
        if path is not None:
            replace(path, render(result))
    if markdown is not None:
        (add_to if append else replace)(markdown, markdown_report.render(result))


def _json(result: Result) -> str:
    return json_format.dumps(json_safe(result), indent=1, allow_nan=False) + "\n"
