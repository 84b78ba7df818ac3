"""What a call into a plugin needs: a clean stdout, the folder kept, its exception in one line."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from strata_core.installed import describe

__all__ = ["describe", "folder_kept", "stdout_to_stderr"]


# `sys.stdout` is one for the whole process, so whether it is diverted is too: redirections of
# several threads that end in another order than they began would leave it diverted for good.
_LOCK = threading.Lock()
_DIVERTED: list[TextIO] = []


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While this runs, what any thread writes to `sys.stdout` goes to stderr.

    It works on `sys.stdout`, not on the file descriptor: changing that would reach into whatever
    else the process does. Several threads may be inside at once; the last one to leave puts
    `sys.stdout` back as the first one found it.
    """
    with _LOCK:
        if not _DIVERTED:
            before, sys.stdout = sys.stdout, sys.stderr if sys.stderr is not None else io.StringIO()
        else:
            before = _DIVERTED[0]
        _DIVERTED.append(before)
    try:
        yield
    finally:
        with _LOCK:
            _DIVERTED.pop()
            if not _DIVERTED:
                sys.stdout = before


@contextlib.contextmanager
def folder_kept() -> Iterator[None]:
    """Go back to the current folder afterwards: paths that the user gave are relative to it.

    Where there is no current folder, or it is gone by then, nothing is done.
    """
    try:
        before = os.getcwd()  # noqa: PTH109 - Path.cwd() would be made a path, and back again
    except OSError:
        before = ""
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(OSError):
                os.chdir(before)
