"""Writing to stdout and stderr, with their failures told apart.

Imports nothing of its own at start: `strata --help` comes through here.
"""

from __future__ import annotations

import errno
import os
import sys


class ReaderGone(Exception):
    """Nobody reads stdout any more, e.g. `strata ... | head`; the command ends quietly."""


def flush() -> None:
    """Hand over what stdout still holds, so that a failure is reported and not lost at exit."""
    write("")


def discard_output() -> None:
    """Let what stdout still holds go nowhere: its reader is gone, and exit would flush it."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a file
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def write(text: str) -> None:
    """Write to stdout at once. Raises ReaderGone or StrataError."""
    if sys.stdout is None:
        if not text:
            return
        raise _unwritten("stdout is closed", "send the output somewhere, e.g. to a file")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # A pipe without a reader is EPIPE, on Windows EINVAL.
        if error.errno in (errno.EPIPE, errno.EINVAL):
            raise ReaderGone from None
        raise _unwritten(
            error.strerror or str(error), "make room, or send the output elsewhere"
        ) from error


def write_error(text: str) -> None:
    """Write to stderr at once; nothing where it is closed."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise


def _unwritten(why: str, remedy: str) -> Exception:
    from strata_core.errors import StrataError

    return StrataError("the output cannot be written", why, remedy)
