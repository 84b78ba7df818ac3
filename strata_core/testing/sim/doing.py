"""Work that a thread of its own does, as a device does: a graph in which a kernel waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from strata_core.testing.sim.work import Stream, Work


class Machine(Protocol):
    """What the thread needs of the simulated machine."""

    closed: bool

    def failed_aside(self, error: BaseException) -> None:
        """Keep an error that nobody is there to be told of."""


class Doing:
    """The pieces of a graph, done one after the other; `lock` is the machine's.

    Whoever holds the lock may ask `goes_on`, and `wait`, which lets it go meanwhile.
    """

    def __init__(self, lock: threading.RLock, pieces: Sequence[Work]) -> None:
        self._lock, self._pieces = lock, pieces
        self._ended = threading.Condition(lock)
        self._left = len(pieces)

    def as_one(self, stream: Stream, graph: int) -> Work:
        """All pieces as one piece of work, for the queue of their stream."""
        uses = tuple(use for piece in self._pieces for use in piece.uses)
        made = Work("graph that waits for the host", stream, uses, self.wait, graph=graph)
        made.running, made.takes = self.goes_on, sum(piece.takes for piece in self._pieces)
        return made

    def start(self, machine: Machine) -> None:
        """Begin; the caller holds the lock."""
        threading.Thread(target=self._run, args=(machine,), name="sim-graph", daemon=True).start()

    def goes_on(self) -> bool:
        """Whether a piece is left."""
        return self._left > 0

    def wait(self) -> None:
        """Until none is left."""
        while self._left:
            self._ended.wait()

    def _run(self, machine: Machine) -> None:
        """All pieces. The last one ends together with the whole: who sees its effect sees both."""
        for piece in self._pieces:
            with self._lock:
                try:
                    if not machine.closed and piece.perform is not None:
                        piece.perform()
                    self._left -= 1
                except BaseException as error:  # noqa: BLE001 - nobody is there to be told
                    machine.failed_aside(error)
                    self._left = 0
                if not self._left:
                    self._ended.notify_all()
                    return
