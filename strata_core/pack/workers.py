"""The same work on many items by a few threads, ended soon when one fails or the user stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

from strata_core.errors import StrataError

_T = TypeVar("_T")
_R = TypeVar("_R")

THREADS = 4
"""Threads that read, hash and write; all three release the interpreter lock."""

CHUNK = 4 << 20
"""Most bytes that a thread holds at once."""


class Stopped(StrataError):
    """The work was given up before this item was done."""


class Workers:
    """`THREADS` threads for one piece of work; a context manager, used from one thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, f"strata-{name}")
        self._stop = threading.Event()

    def map(self, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """The results in the items' order. Raises what an item that failed raised.

        After a failure nothing more is begun, and what runs ends at its next `check`.
        """
        jobs = [self._pool.submit(work, item) for item in items]
        left: Collection[Future[_R]] = jobs
        while left and not any(job.done() and job.exception() for job in jobs):
            # With an end, so that Ctrl-C is heard on every system.
            left = wait(left, timeout=0.5, return_when=FIRST_EXCEPTION).not_done
        for job in jobs:
            if job.done() and (error := job.exception()) is not None:
                raise error
        return [job.result() for job in jobs]

    def check(self) -> None:
        """Called by the work between chunks: raises Stopped where nobody wants the result."""
        if self._stop.is_set():
            raise Stopped("stopped")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
