"""Writing to stdout and stderr, with their failures told apart.

Imports nothing of its own at start: `strata --help` comes through here.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class ReaderGone(Exception):
    """Nobody reads stdout any more, e.g. `strata ... | head`; the command ends quietly."""


# Stdout while it is `own`; and whether the one document of this command has been written.
_OWN: list[TextIO | None] = []
_DOCUMENTS: list[str] = []


@contextmanager
def own_stdout() -> Iterator[None]:
    """While this runs, `write` alone reaches stdout: what anything else prints goes to stderr.

    A plugin may print at any time, and must not print into a document or a text.
    """
    before, sys.stdout = sys.stdout, _elsewhere()
    _OWN.append(before)
    try:
        yield
    finally:
        sys.stdout = before
        _OWN.pop()


@contextmanager
def shared_stdout() -> Iterator[None]:
    """Inside `own_stdout`: stdout as it was, for what can only print."""
    during = sys.stdout
    sys.stdout = _OWN[-1] if _OWN else during
    try:
        yield
    finally:
        sys.stdout = during


def _elsewhere() -> TextIO:
    return sys.stderr if sys.stderr is not None else open(os.devnull, "w")  # noqa: PTH123


def begin() -> None:
    """A command begins: it has written no document."""
    _DOCUMENTS.clear()


def write_document(text: str) -> None:
    """Write the one document of a command to stdout; a second one goes to stderr instead."""
    if _DOCUMENTS:
        write_error(text)
        return
    _DOCUMENTS.append(text)
    write(text)


def document_written() -> bool:
    """Whether this command has written its document."""
    return bool(_DOCUMENTS)


def flush() -> None:
    """Hand over what stdout still holds, so that a failure is reported and not lost at exit."""
    write("")


def discard_output() -> None:
    """Let what stdout still holds go nowhere: its reader is gone, and exit would flush it."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a file
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def write(text: str) -> None:
    """Write to stdout at once. Raises ReaderGone or StrataError."""
    stdout = _OWN[-1] if _OWN else sys.stdout
    if stdout is None:
        if not text:
            return
        raise _unwritten("stdout is closed", "send the output somewhere, e.g. to a file")
    try:
        stdout.write(text)
        stdout.flush()
    except OSError as error:
        # A pipe without a reader is EPIPE, on Windows EINVAL.
        if error.errno in (errno.EPIPE, errno.EINVAL):
            raise ReaderGone from None
        raise _unwritten(
            error.strerror or str(error), "make room, or send the output elsewhere"
        ) from error


def write_error(text: str) -> None:
    """Write to stderr at once; nothing where it is closed, full, or read by nobody.

    What cannot be told is no reason to stop what was asked for.
    """
    if sys.stderr is None:
        return
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _unwritten(why: str, remedy: str) -> Exception:
    from strata_core.errors import StrataError

    return StrataError("the output cannot be written", why, remedy)
