"""Writing reports to files, each whole or not at all."""

import contextlib
import json as json_format
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from parity_reports.text import Result, json_safe
from qwen35.errors import InputError


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
            _replace(path, render(result))
    if markdown is not None:
        (_append if append else _replace)(markdown, markdown_report.render(result))


def _json(result: Result) -> str:
    return json_format.dumps(json_safe(result), indent=1, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe or /dev/stdout cannot be replaced; a folder fails here, with its name.
        _append(path, text)
        return
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        # Not tempfile: its files are private, and a report is read by others.
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _append(path: Path, text: str) -> None:
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> InputError:
    if not os.path.isdir(path.parent):
        return InputError(
            f"{path}: cannot be written, there is no folder {path.parent}. Make the folder, or "
            "name a file in an existing one."
        )
    return InputError(
        f"{path}: cannot be written ({error.strerror}). Name a file in a folder that you may "
        "write to."
    )
