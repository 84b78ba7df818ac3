"""Copies beside rounds: two streams of a device, one for each direction, and when they landed.

What is asked for between two rounds is a wave: it lands together, and is asked for by one event. It
is put on the streams beside the next round, since the driver takes some microseconds for each copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from attrs import define, field

from strata_core.cache.beside import Job, Jobs
from strata_core.cache.waiting import happens
from strata_core.errors import DeviceError
from strata_core.memory.held import undo_all
from strata_core.runtime import Runtime


@define(eq=False)
class Wave:
    """Copies that were put on the streams after one round; they land together."""

    event: int
    landed: bool = False


Pending = tuple[int, int, int, int]
"""A copy that was asked for: target, source, bytes, stream."""


@define(eq=False)
class Waves:
    """The streams `into` and `out` of a device. Used by one thread.

    `jobs`, the caller's, put copies on them; a wave whose job is never run never lands.
    Methods raise DeviceError where a verb fails; `look` does for the copies asked for before it.
    """

    runtime: Runtime
    device: int
    jobs: Jobs
    into: int = field(init=False)
    out: int = field(init=False)
    _order: int = field(init=False)
    _events: list[int] = field(factory=list, init=False)
    _idle_events: list[int] = field(factory=list, init=False)
    _waves: list[Wave] = field(factory=list, init=False)
    _current: Wave | None = field(default=None, init=False)
    _copies: list[Pending] = field(factory=list, init=False)
    _launching: Job[None] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        made: list[int] = []
        try:
            made.append(self.runtime.create_stream(self.device))
            made.append(self.runtime.create_stream(self.device))
            self.into, self.out = made
            self._order = self.runtime.create_event(self.device)
        except BaseException:
            undo_all(self.runtime, [partial(self.runtime.destroy_stream, s) for s in made])
            raise

    def bring(self, target: int, source: int, nbytes: int) -> Wave:
        """Copy to the device; the wave that this lands with."""
        self._copies.append((target, source, nbytes, self.into))
        return self._wave()

    def fetch(self, target: int, source: int, nbytes: int) -> Wave:
        """Copy from the device; the wave that this lands with."""
        self._copies.append((target, source, nbytes, self.out))
        return self._wave()

    def end(self) -> None:
        """What was asked for since the last time is a wave, and is put on the streams now.

        Where the last one is not there yet, it becomes part of the next.
        """
        if self._current is None or not self._is_launched(0):
            return
        copies, self._copies = self._copies, []
        self._launching = self.jobs.begin(partial(self._launch, copies, self._current.event))
        self._waves.append(self._current)
        self._current = None

    def _launch(self, copies: Sequence[Pending], event: int) -> None:
        """In a job: put copies on their streams, and behind all of them the event."""
        try:
            for copy in copies:
                self.runtime.copy(*copy)
            self.runtime.record(self._order, self.out)
            self.runtime.wait(self.into, self._order)
            self.runtime.record(event, self.into)
        except DeviceError:
            self.runtime.take_error()  # it is this thread's
            raise

    def _is_launched(self, bound: float) -> bool:
        """Wait, `bound` seconds at most, until the last wave is on the streams; whether it is.

        Raises what kept it from there, each time: its event says nothing.
        """
        if self._launching is None:
            return True
        if not self._launching.wait(bound):
            return False
        self._launching.result()
        self._launching = None
        return True

    def look(self) -> None:
        """Ask, without waiting, which waves have landed; they do so in their order."""
        if not self._is_launched(0):
            return  # nothing of the last one can have landed: all are asked for next time
        while self._waves and self.runtime.finished(self._waves[0].event):
            wave = self._waves.pop(0)
            wave.landed = True
            self._idle_events.append(wave.event)

    def still(self, patience: float) -> bool:
        """Whether nothing moves any more, after waiting `patience` seconds at most."""
        limit = time.monotonic() + patience
        # also of one that failed: what of it was put on the streams is waited for
        if self._launching is not None and not self._launching.wait(patience):
            return False
        try:
            for stream in (self.into, self.out):
                self.runtime.record(self._order, stream)
                if not happens(self.runtime, self._order, limit - time.monotonic()):
                    return False
        except DeviceError:
            self.runtime.take_error()
            return False
        return True

    def drain(self) -> None:
        """Wait until nothing moves, whatever fails of it."""
        if self._launching is not None:
            self._launching.wait(None)
        steps = [partial(self.runtime.synchronize, stream) for stream in (self.into, self.out)]
        undo_all(self.runtime, steps)

    def close(self) -> None:
        """Free streams and events; nothing may be moving. Again, it does nothing."""
        if self._closed:
            return
        self._closed = True
        events, streams = (self._order, *self._events), (self.into, self.out)
        steps = [partial(self.runtime.destroy_event, event) for event in events]
        steps += [partial(self.runtime.destroy_stream, stream) for stream in streams]
        undo_all(self.runtime, steps)

    def _wave(self) -> Wave:
        """The wave of what is copied now."""
        if self._current is None:
            if not self._idle_events:
                self._events.append(self.runtime.create_event(self.device))
                self._idle_events.append(self._events[-1])
            self._current = Wave(self._idle_events.pop())
        return self._current
