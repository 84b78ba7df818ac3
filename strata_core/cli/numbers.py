"""How numeric options are read, with errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite

import click


def whole(low: int = 0) -> Callable[[object], int]:
    """A reader of whole numbers of at least `low`. It raises click.BadParameter."""

    def read(value: object) -> int:
        text = str(value)
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII) or int(text) < low:
            raise click.BadParameter(f"{text[:40]!r} is not a whole number of at least {low}")
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
