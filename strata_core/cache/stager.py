"""Experts on their way to a device while it computes: copied from where they lie, or read first.

An expert that a copy engine can read is copied from there. One in other memory, or in the file,
goes through a page-locked buffer of a ring: it is read into one while others are being copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.cache.runs import runs
from strata_core.cache.staging import Staging
from strata_core.cache.waiting import Patience
from strata_core.checkpoint.scales import check_scales
from strata_core.interfaces import BlobLayout, Expert, Source, StableSource, View
from strata_core.memory.address import bytes_at
from strata_core.runtime import Runtime

COPIERS = 4
"""Threads that copy experts out of memory that no copy engine reads: one is slower than a link."""

ALONE = 1 << 20
"""Bytes of an expert that one thread copies as fast as several."""


@define(eq=False)
class Stager:
    """Puts copies of experts on `stream`; used by one thread.

    `staging` lends its buffers, with an event of the device for each. `experts` and `nbytes` count
    what was copied. A view whose addresses do not hold by themselves is kept until its copy is
    over: `let_go` ends a group of them, and waits for the group before it.
    """

    runtime: Runtime
    stream: int
    source: Source
    staging: Staging
    patience: Patience
    events: tuple[int, ...]
    experts: int = field(default=0, init=False)
    nbytes: int = field(default=0, init=False)
    _copiers: ThreadPoolExecutor | None = field(default=None, init=False)
    _pausing: bool = field(init=False)
    _turn: int = field(default=0, init=False)
    _held: list[Expert] = field(factory=list, init=False)
    _earlier: tuple[int, list[Expert]] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        # asked once: a protocol's isinstance takes longer than all else that an expert costs
        self._pausing = not isinstance(self.source, StableSource)

    def begin(self, layer: int, experts: Sequence[int]) -> None:
        """Tell the source which experts of a layer come next; it may read ahead."""
        if experts:
            self.source.begin_layer(layer, experts)

    def send(self, expert: Expert, layout: BlobLayout, target: int) -> None:
        """Copy an expert's blob to a device. Raises StrataError, naming the expert."""
        view = self.source.view(expert)
        self._held.append(expert)
        if view.dma:
            self._copy(layout, view, target)
        else:
            self._by_ring(expert, layout, view, target)
        if not self._pausing:
            self._release(self._held)
        self.experts += 1
        self.nbytes += layout.nbytes

    def fetch(self, blob: int, layout: BlobLayout, parts: Sequence[int]) -> None:
        """Copy a blob from the device to memory that no copy engine may write, and wait for it."""
        turn = self._next()
        address = self.staging.addresses[turn]
        self.runtime.copy(address, blob, layout.nbytes, self.stream)
        self.runtime.record(self.events[turn], self.stream)
        self.patience.wait(self.events[turn], "a copy from the device")
        buffer = bytes_at(address, layout.nbytes)
        for part, at in zip(layout.parts, parts, strict=True):
            bytes_at(at, part.nbytes)[:] = buffer[part.offset : part.offset + part.nbytes]

    def let_go(self, event: int) -> None:
        """Give back what was sent before the last call; `event` is behind what was sent since then.

        So the copies of a group are under way while those of the next one are put on the stream.
        `event` must not be used for another group before that.
        """
        if self._held:
            self.settle()
            self._earlier, self._held = (event, self._held), []

    def settle(self) -> None:
        """Wait for the groups that were let go, and give them back."""
        if self._earlier is not None:
            event, experts = self._earlier
            self.patience.wait(event, "the copies of a prompt's experts")
            self._earlier = None
            self._release(experts)

    def abandon(self) -> None:
        """Give back what is held; no copy may be under way."""
        if self._earlier is not None:
            self._release(self._earlier[1])
            self._earlier = None
        self._release(self._held)

    def _release(self, experts: list[Expert]) -> None:
        while experts:
            self.source.release(experts.pop())

    def _copy(self, layout: BlobLayout, view: View, target: int) -> None:
        for offset, address, nbytes in runs(layout, view.parts):
            self.runtime.copy(target + offset, address, nbytes, self.stream)

    def _by_ring(self, expert: Expert, layout: BlobLayout, view: View, target: int) -> None:
        turn = self._next()
        address = self.staging.addresses[turn]
        buffer = bytes_at(address, self.staging.nbytes)
        pad = 0
        if view.in_ram:
            self._gather(layout, view, address)
        else:
            pad = self.source.read_into(expert, buffer.data)
            _check(expert, layout, buffer[pad:])
        self.runtime.copy(target, address + pad, layout.nbytes, self.stream)
        self.runtime.record(self.events[turn], self.stream)

    def _gather(self, layout: BlobLayout, view: View, target: int) -> None:
        """Copy an expert's parts from memory to where its blob is to begin, by several threads."""
        jobs = _jobs(layout, view, target, COPIERS if layout.nbytes >= ALONE else 1)
        if len(jobs) == 1:
            _move(jobs[0])
            return
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(COPIERS - 1, "strata-stager")
        others = [self._copiers.submit(_move, job) for job in jobs[1:]]
        _move(jobs[0])
        for job in others:
            job.result()

    def close(self) -> None:
        """End the threads; nothing may be sent afterwards."""
        copiers, self._copiers = self._copiers, None
        if copiers is not None:
            copiers.shutdown()

    def _next(self) -> int:
        """The number of a buffer that nothing is copied from any more."""
        turn = self._turn
        self._turn = (turn + 1) % len(self.events)
        self.patience.wait(self.events[turn], "a copy of a prompt's expert")
        return turn


def _jobs(
    layout: BlobLayout, view: View, target: int, count: int
) -> list[list[tuple[int, int, int]]]:
    """The (to, from, bytes) that make up a blob, in at most `count` jobs of about the same size."""
    share = -(-layout.nbytes // count)
    jobs: list[list[tuple[int, int, int]]] = [[]]
    left = share
    for part, at in zip(layout.parts, view.parts, strict=True):
        done = 0
        while done < part.nbytes:
            if not left:
                jobs.append([])
                left = share
            piece = min(left, part.nbytes - done)
            jobs[-1].append((target + part.offset + done, at + done, piece))
            done, left = done + piece, left - piece
    return jobs


def _move(job: list[tuple[int, int, int]]) -> None:
    """Copy pieces; the interpreter is free meanwhile."""
    for target, source, nbytes in job:
        ctypes.memmove(target, source, nbytes)


def _check(expert: Expert, layout: BlobLayout, blob: NDArray[np.uint8]) -> None:
    for part in layout.parts:
        check_scales(part.type, blob[part.offset : part.offset + part.nbytes], str(expert))
