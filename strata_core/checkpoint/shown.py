"""Words from a model file, made fit to be shown in a terminal."""

from __future__ import annotations


def printable(text: str, most: int = 120) -> str:
    """One line of at most `most` characters (and an ellipsis); control characters are escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return shown if len(text) <= most and len(shown) <= most else shown[:most] + "..."
