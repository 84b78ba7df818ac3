"""Work beside rounds: functions that a thread of its own runs while the next round does.

A round leaves the interpreter idle, so what need not be done between two of them is done there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, Protocol, TypeVar

from attrs import define, field

from strata_core.errors import EngineError

Given = TypeVar("Given")


@define(eq=False)
class Job(Generic[Given]):
    """A function that was handed over to be run, and what it gave or raised.

    One thread ends it; any thread may look, wait and ask.
    """

    work: Callable[[], Given] | None
    done: bool = field(default=False, init=False)
    _over: Lock = field(factory=Lock, init=False)
    _given: Given | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._over.acquire()

    def run(self) -> None:
        """Run it. Raises nothing: `result` does."""
        work, self.work = self.work, None  # what it holds goes with it
        assert work is not None, "it is ended once"
        try:
            self._given = work()
        except BaseException as error:  # noqa: BLE001 - of whoever asks for the result
            self._error = error
        self._end()

    def give_up(self) -> None:
        """It will not be run."""
        self.work = None
        self._error = EngineError(
            "what was to be done beside rounds was not",
            "the thread for it has ended",
            "this is an error in the engine; please report it",
        )
        self._end()

    def _end(self) -> None:
        self.done = True
        self._over.release()

    def wait(self, bound: float | None) -> bool:
        """Wait, `bound` seconds at most (None: without a bound), until it ends; whether it has."""
        if not self.done and self._over.acquire(timeout=-1 if bound is None else max(0.0, bound)):
            self._over.release()
        return self.done

    def result(self) -> Given:
        """What it gave; it has ended. Raises what it raised, each time."""
        assert self.done, "who asks has looked"
        if self._error is not None:
            raise self._error
        return self._given  # type: ignore[return-value]


class Jobs(Protocol):
    """Runs functions, one after the other in the order in which they are handed over."""

    def begin(self, work: Callable[[], Given]) -> Job[Given]:
        """Have a function run. Raises nothing of what that raises."""

    def close(self, bound: float) -> None:
        """Run no others: what has not begun never does, and raises EngineError where it is asked.

        Waits, `bound` seconds at most, for the one that is under way. Raises EngineError where it
        does not come to an end; its thread goes on. Again, it does nothing.
        """


class Beside:
    """Jobs of a thread of their own, which begins with the first one. One thread hands them over.

    A queue and two locks, where an executor of the library's takes three times as long to be handed
    a function. The thread ends with `close`, and where nobody has a hold of this any more.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._thread = Thread(target=_run_all, args=(self._queue,), name=name, daemon=True)
        self._started = self._closed = False
        self._end = weakref.finalize(self, self._queue.put, None)
        # whoever still runs rounds while the interpreter ends has them done as before
        self._end.atexit = False

    def begin(self, work: Callable[[], Given]) -> Job[Given]:
        """Have the thread run a function after those that it has already.

        Raises RuntimeError where the system gives no thread.
        """
        job = Job(work)
        if self._closed:
            job.give_up()
            return job
        if not self._started:
            self._thread.start()
            self._started = True
        self._queue.put(job)
        return job

    def close(self, bound: float) -> None:
        """As `Jobs.close`."""
        if self._closed:
            return
        self._closed = True
        while (job := self._next()) is not None:
            job.give_up()
        self._end.detach()  # to call it does nothing while the interpreter ends
        self._queue.put(None)
        if not self._started:
            return
        self._thread.join(bound)
        if self._thread.is_alive():
            raise EngineError(
                f"the thread {self._thread.name} did not come to an end",
                f"what it does took more than {bound:g} s",
                "if it happens again, look at the system's log for errors of the device",
            )

    def _next(self) -> Job[Any] | None:
        """A job that the thread has not begun; it never will."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None


def _run_all(queue: SimpleQueue[Job[Any] | None]) -> None:
    """In the thread: run jobs until None comes. It holds nothing of one that is done."""
    while (job := queue.get()) is not None:
        job.run()
        del job
