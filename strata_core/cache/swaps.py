"""Swaps: two experts change places between a device's slots and host memory, beside rounds.

Two phases. First the entering blob is copied into an empty slot, and the leaving one to host memory
where the source gives room for it; rounds and the source see nothing of that. Once all of it has
landed, which is asked without waiting, the swap is committed between two rounds: they find the
entering expert in its slot from then on, and the other's slot is empty. Until then everything can
be undone, and a failure undoes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from attrs import define, field

from strata_core.abilities import AdaptiveSource, Move
from strata_core.cache.adaptive import Pair
from strata_core.cache.beside import Jobs
from strata_core.cache.runs import runs
from strata_core.cache.slots import SlotPool
from strata_core.cache.staging import staging_bytes
from strata_core.cache.swap import Counts, Policy, Swap, Table
from strata_core.cache.swap_reports import Reports
from strata_core.cache.waves import Waves
from strata_core.checkpoint.scales import check_scales
from strata_core.errors import Degradation, DeviceError
from strata_core.interfaces import BlobLayout, Expert, Source, StableSource, View
from strata_core.memory.address import bytes_at
from strata_core.memory.held import undo_all
from strata_core.runtime import Runtime

BUFFERS = 4
"""Page-locked buffers for blobs that a copy engine cannot reach where they lie."""

READERS = 2
"""Threads that fill these buffers and empty them."""


def buffer_bytes(largest: int) -> int:
    """Bytes of all buffers, for blobs of up to `largest` bytes."""
    return BUFFERS * staging_bytes(largest)


@define(eq=False, kw_only=True)
class Swapper:
    """Carries swaps out. One thread calls it, between rounds.

    `jobs` put copies on their streams; the caller closes them, before this. `buffers` are addresses
    of page-locked memory of `staging_bytes` each, the caller's. After a failure of the device, or
    `stop`, `stopped` is true, and no more swaps begin.
    """

    runtime: Runtime
    pool: SlotPool
    layouts: Mapping[int, BlobLayout]
    source: Source
    table: Table
    policy: Policy
    jobs: Jobs
    degrade: Callable[[Degradation], None]
    patience: float
    buffers: list[int]
    stopped: bool = field(default=False, init=False)
    counts: Counts = field(factory=Counts, init=False)
    _mover: AdaptiveSource | None = field(init=False)
    _stable: StableSource | None = field(init=False)
    _waves: Waves = field(init=False)
    _open: list[Swap] = field(factory=list, init=False)
    _readers: ThreadPoolExecutor = field(init=False)
    _reports: Reports = field(init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        # asked once: a look at a protocol takes as long as a copy's launch
        self._mover = self.source if isinstance(self.source, AdaptiveSource) else None
        self._stable = self.source if isinstance(self.source, StableSource) else None
        self._waves = Waves(self.runtime, self.pool.device, self.jobs)
        self._readers = ThreadPoolExecutor(READERS, "strata-swap")
        place = f"{self.runtime.label}{self.pool.device}"
        self._reports = Reports(place, self.degrade)

    @property
    def under_way(self) -> int:
        """Swaps that have begun and are neither committed nor undone."""
        return len(self._open)

    def tick(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Between two rounds: commit what has landed, begin `pairs`; those without room come back.

        Raises nothing that a driver or a source raises: a swap that fails is undone and reported.
        """
        if self.stopped or not (self._open or pairs):
            return []
        try:
            self._go_on()
            back = [pair for pair in pairs if not self._begin(pair)]
            self._waves.end()
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            self.stop(error)
            return []
        return back

    def settle(self) -> bool:
        """Wait, bounded, until no swap is under way; whether that is so. It may be asked again."""
        limit = time.monotonic() + self.patience
        late = False
        while self._open and not self.stopped and not late:
            late = time.monotonic() > limit  # before the last look, not after it
            self.tick(())
            if self._open:
                time.sleep(0.0005)
        if self.stopped:
            self._undo_once_still()
        return not self._open

    def reading(self) -> Expert | None:
        """An expert under way that the source is still being asked to read; None: there is none."""
        asked = (s.pair.entering for s in self._open if s.reading and not s.reading.done())
        return next(asked, None)

    def stop(self, error: Exception) -> None:
        """No more swaps: report why, and undo those under way once nothing moves any more.

        Waits for that, bounded by the patience. What is not known to have ended stays taken until
        `settle` or `close` finds that it has.
        """
        self.stopped = True
        self.runtime.take_error()
        self.counts = self.counts.plus(undone=len(self._open))
        self._undo_once_still()
        self._reports.stopped(error)

    def close(self) -> None:
        """Undo what is under way, free streams and events. Calling it again does nothing.

        No round may be running; the buffers may be freed afterwards.
        """
        if self._closed:
            return
        self._closed = self.stopped = True
        self._readers.shutdown(wait=True, cancel_futures=True)
        undo_all(self.runtime, [self._waves.drain, self._undo_all, self._waves.close])

    # beginning

    def _begin(self, pair: Pair) -> bool:
        """Begin a swap; False where there is no room for it now."""
        layout = self.layouts[pair.entering.layer]
        slot = self.pool.take_spare(layout)
        if slot is None:
            return False
        swap = Swap(pair, slot, about=pair.entering)
        self._open.append(swap)
        self.policy.bar(pair.leaving)
        self.policy.bar(pair.entering)
        try:
            view = self._reachable(pair.entering)
            if self._prepare(swap, needs_in=view is None):
                self._start(swap, view)
                return True
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            swap.error = error
            return True
        self._undo(swap)
        return False

    def _prepare(self, swap: Swap, *, needs_in: bool) -> bool:
        """Have the source make room, and take the buffers; False where there are too few."""
        if self._mover is not None:
            swap.promote = self._mover.begin_promote(swap.pair.entering)
            swap.about = swap.pair.leaving
            swap.demote = self._mover.begin_demote(swap.pair.leaving)
            swap.about = swap.pair.entering
        needs_out = swap.demote is not None and not swap.demote.dma
        if needs_in + needs_out > len(self.buffers):
            return False
        swap.into = self.buffers.pop() if needs_in else None
        swap.out = self.buffers.pop() if needs_out else None
        return True

    def _reachable(self, expert: Expert) -> View | None:
        """Where a copy engine finds an expert; None where a thread has to fetch it."""
        if self._stable is None:
            return None  # to ask it would be to wait for its file
        view = self.source.view(expert)
        self.source.release(expert)
        return view if view.dma else None

    def _start(self, swap: Swap, view: View | None) -> None:
        """Have copies begin; `view` is where a copy engine finds the entering expert."""
        leaving, entering = swap.pair.leaving, swap.pair.entering
        if swap.demote is not None and swap.demote.parts is not None:
            slot, layout = self.pool.places[leaving], self.layouts[leaving.layer]
            if swap.out is not None:
                swap.wave = self._waves.fetch(swap.out, slot, layout.nbytes)
            else:
                for offset, target, nbytes in runs(layout, swap.demote.parts):
                    swap.wave = self._waves.fetch(target, slot + offset, nbytes)
        if view is None:
            assert swap.into is not None, "what cannot be reached was given a buffer"
            swap.reading = self._readers.submit(self._read, entering, swap.into)
            return
        for offset, address, nbytes in runs(self.layouts[entering.layer], view.parts):
            swap.wave = self._waves.bring(swap.slot + offset, address, nbytes)

    def _read(self, expert: Expert, address: int) -> int:
        """In a thread: the blob into a buffer; how many bytes in it begins."""
        layout = self.layouts[expert.layer]
        buffer = bytes_at(address, staging_bytes(layout.nbytes))
        pad = self.source.read_into(expert, buffer.data)
        for part in layout.parts:
            start = pad + part.offset
            check_scales(part.type, buffer[start : start + part.nbytes], str(expert))
        return pad

    # going on

    def _go_on(self) -> None:
        self._waves.look()
        ready = []
        for swap in list(self._open):
            try:
                if self._advance(swap):
                    ready.append(swap)
            except DeviceError:
                raise
            except Exception as error:  # noqa: BLE001 - a source may be a plugin's
                swap.error = error
        self._commit(ready)

    def _advance(self, swap: Swap) -> bool:
        """Take a swap as far as it goes without waiting; whether all of it has landed."""
        if swap.reading is not None:
            if not swap.reading.done():
                return False
            reading, swap.reading = swap.reading, None
            pad = reading.result()
            assert swap.into is not None, "it was read into one"
            nbytes = self.layouts[swap.pair.entering.layer].nbytes
            swap.wave = self._waves.bring(swap.slot, swap.into + pad, nbytes)
            return False
        if swap.wave is not None:
            if not swap.wave.landed:
                return False
            swap.wave = None
            if swap.error is None and swap.out is not None:
                swap.about = swap.pair.leaving
                swap.storing = self._readers.submit(self._store, swap)
        if swap.storing is not None:
            if not swap.storing.done():
                return False
            storing, swap.storing = swap.storing, None
            storing.result()
        if swap.error is not None:
            self._fail(swap, swap.error)
            return False
        return True

    def _store(self, swap: Swap) -> None:
        """In a thread: the leaving blob from its buffer to where the source wants it."""
        assert swap.out is not None, "it was copied into one"
        assert swap.demote is not None, "it is for one"
        assert swap.demote.parts is not None, "its bytes are wanted"
        layout = self.layouts[swap.pair.leaving.layer]
        for part, target in zip(layout.parts, swap.demote.parts, strict=True):
            piece = bytes_at(swap.out + part.offset, part.nbytes)
            bytes_at(target, part.nbytes)[:] = piece

    # ends

    def _commit(self, ready: Sequence[Swap]) -> None:
        good = [swap for swap in ready if self._show_leaving(swap)]
        if not good:
            return
        try:
            self.table.publish([(swap.pair, swap.slot) for swap in good])
        except Exception:
            for swap in good:
                self._hide_leaving(swap)
            raise
        for swap in good:
            self._done(swap)
        entered = [self._bytes(swap) for swap in good]
        left = [self._bytes(swap) for swap in good if swap.shown]
        self.counts = self.counts.plus(
            entered=len(entered), entered_bytes=sum(entered), left=len(left), left_bytes=sum(left)
        )
        self.table.refresh([e for s in good for e in (s.pair.leaving, s.pair.entering)])

    def _bytes(self, swap: Swap) -> int:
        """Bytes of either expert's blob."""
        return self.layouts[swap.pair.entering.layer].nbytes

    def _show_leaving(self, swap: Swap) -> bool:
        """Have the source show its copy of the leaving expert, which is still in its slot."""
        if swap.demote is None or self._mover is None:
            return True
        demote, swap.demote = swap.demote, None
        try:
            self._mover.commit(demote)
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            swap.about = swap.pair.leaving
            self._fail(swap, error)
            return False
        swap.shown = True
        return True

    def _hide_leaving(self, swap: Swap) -> None:
        """The leaving expert stays, and its copy's room is given back."""
        if not swap.shown or self._mover is None:
            return
        try:
            move = self._mover.begin_promote(swap.pair.leaving)
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            self._reports.unended(swap.pair.leaving, error)
            return
        if move is not None:
            self._end(self._mover.commit, move)

    def _end(self, how: Callable[[Move], None], move: Move) -> None:
        """End a move of the source, which nothing depends on any more, whatever it raises."""
        try:
            how(move)
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            self._reports.unended(move.expert, error)

    def _done(self, swap: Swap) -> None:
        pair = swap.pair
        layout = self.layouts[pair.entering.layer]
        self.pool.places[pair.entering] = swap.slot
        self.pool.give_spare(layout, self.pool.places.pop(pair.leaving))
        self._forget(swap)
        self.policy.moved(pair)
        self.policy.bar(pair.entering, barred=False)
        if swap.promote is not None and self._mover is not None:
            self._end(self._mover.commit, swap.promote)

    def _fail(self, swap: Swap, error: Exception) -> None:
        """Undo a swap for which the source had an error; whom it is about is not tried again."""
        self._undo(swap)
        self.counts = self.counts.plus(undone=1)
        self.policy.bar(swap.about)
        told = self._reports.kept if swap.about == swap.pair.leaving else self._reports.undone
        told(swap.about, error)

    def _undo(self, swap: Swap) -> None:
        """All as it was. Nothing of the swap may be under way."""
        if self._mover is not None:
            for move in (swap.demote, swap.promote):
                if move is not None:
                    self._end(self._mover.abort, move)
        self.pool.give_spare(self.layouts[swap.pair.entering.layer], swap.slot)
        self._forget(swap)
        self.policy.bar(swap.pair.entering, barred=False)

    def _forget(self, swap: Swap) -> None:
        self._open.remove(swap)
        self.buffers += [each for each in (swap.into, swap.out) if each is not None]
        self.policy.bar(swap.pair.leaving, barred=False)

    def _undo_all(self) -> None:
        for swap in list(self._open):
            self._undo(swap)

    def _undo_once_still(self) -> None:
        """Undo what is under way, if that comes to its end within the patience."""
        if not self._open:
            return
        jobs: list[Future[Any]] = []
        for swap in self._open:
            jobs += [job for job in (swap.reading, swap.storing) if job is not None]
        if not wait(jobs, self.patience).not_done and self._waves.still(self.patience):
            self._undo_all()
