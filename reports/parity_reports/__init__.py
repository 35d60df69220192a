"""Pictures of a finished run: terminal, HTML, Markdown, JUnit."""

from parity_reports.write import write

__all__ = ["write"]
