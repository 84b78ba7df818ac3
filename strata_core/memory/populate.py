"""Bringing reserved memory into RAM with several threads, from its beginning to its end.

First touch is what page-locking spends its time on, and drivers do it with one thread; here it is
done before, in chunks that threads take in ascending order, so that what is ready grows from the
beginning and can be registered while the rest follows.
"""

from __future__ import annotations

import threading
from threading import Condition, Thread

from strata_core.memory.platform import SystemMemory

CHUNK = 32 << 20
"""Bytes that one thread populates at a time; a multiple of every page size."""


class Populator:
    """Populates `nbytes` at `address` in the background, from `start` until `stop`.

    Any thread may call its methods. Chunks begin at `address`; `extend` decides how far it goes.
    """

    def __init__(
        self, system: SystemMemory, address: int, nbytes: int, threads: int, chunk: int = CHUNK
    ) -> None:
        self._system, self._address, self._nbytes = system, address, nbytes
        self._chunk = chunk
        self._until = 0
        self._next = 0
        self._ready = 0
        self._done: set[int] = set()
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = Condition()
        self._threads = [
            Thread(target=self._work, name=f"strata-populate-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def extend(self, until: int) -> None:
        """Go on up to the offset `until`."""
        with self._changed:
            self._until = max(self._until, min(until, self._nbytes))
            self._changed.notify_all()

    def wait(self, until: int) -> bool:
        """Wait until everything below the offset `until` is populated; False where it was stopped.

        Raises OSError where the system refused.
        """
        self.extend(until)
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready >= min(until, self._nbytes) or self._stopped or self._error
            )
            if self._error is not None:
                raise self._error
            return self._ready >= min(until, self._nbytes)

    def hold(self) -> None:
        """Take no further chunk until `extend` or `wait` asks for more."""
        with self._changed:
            self._until = min(self._until, self._next)

    def stop(self) -> None:
        """End the threads; chunks that were begun are finished first."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        while (start := self._take()) is not None:
            end = min(start + self._chunk, self._nbytes)
            try:
                self._system.populate(self._address + start, end - start)
            except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            self._finish(start)

    def _take(self) -> int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or self._error
                    or self._next < self._until
                    or self._next >= self._nbytes
                )
            )
            if self._stopped or self._error or self._next >= self._nbytes:
                return None
            start = self._next
            self._next = min(start + self._chunk, self._nbytes)
            return start

    def _finish(self, start: int) -> None:
        with self._changed:
            self._done.add(start)
            while self._ready in self._done:
                self._done.remove(self._ready)
                self._ready = min(self._ready + self._chunk, self._nbytes)
            self._changed.notify_all()
