"""Text from a file, made fit for a terminal: no control codes, no lone surrogates, not too long."""


def shown(text: str, most: int = 120) -> str:
    """Return `text`, escaped where it is not printable, and cut after `most` characters."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else text[: most - 1] + "…"
