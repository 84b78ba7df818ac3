"""Sizes and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Bytes in the unit that reads best, e.g. "2.57 MiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:.2f} GiB"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns, each line ended; the last column is as wide as it likes."""
    lines = [heading, *rows] if heading else list(rows)
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"
