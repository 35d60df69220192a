"""Pictures of a finished run: terminal, HTML, Markdown, JUnit."""
