"""How numeric options are read, with errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite

import click


def whole(low: int = 0, high: int | None = None) -> Callable[[object], int]:
    """A reader of whole numbers from `low` to `high` (None: no bound). It raises BadParameter."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def read(value: object) -> int:
        text = str(value)
        known = re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII)
        if not known or int(text) < low or (high is not None and int(text) > high):
            raise click.BadParameter(f"{text[:40]!r} is not a whole number {bounds}")
        return int(text)

    return read


def real(value: object) -> float:
    """A finite number. Raises click.BadParameter."""
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not isfinite(number):
        raise click.BadParameter(f"{str(value)[:40]!r} is not a number")
    return number
