"""Two things that every call into a plugin needs: a clean stdout, and its exception in one line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator


def describe(error: BaseException) -> str:
    """An exception on one line of at most 400 characters; even its own text may fail."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a plugin's exception class may be broken as well
        text = "(its text cannot be had)"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 400 else line[:397] + "..."


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While this runs, what any thread writes to `sys.stdout` goes to stderr.

    It works on `sys.stdout`, not on the file descriptor: changing that would reach into whatever
    else the process does.
    """
    with contextlib.redirect_stdout(sys.stderr if sys.stderr is not None else io.StringIO()):
        yield
