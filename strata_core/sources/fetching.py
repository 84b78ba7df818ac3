"""A whole source made from one function that fetches blobs: for plugins whose experts are far away.

An author supplies a `Fetcher`; `FetchingSource` does the rest of what `interfaces.Source` asks:
memory from the allocator, blobs kept there while there is room, fetches that run ahead in threads,
addresses that hold until their release, errors that leave the source as it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from attrs import define, field, frozen

from strata_core.checkpoint.scales import check_scales
from strata_core.errors import StrataError
from strata_core.installed import describe
from strata_core.interfaces import BlobLayout, Expert, Region, SourceContext, View
from strata_core.memory.address import bytes_at
from strata_core.memory.spans import reach
from strata_core.pack.reads import ReadCheck

SLOT_ALIGNMENT = 4096
"""Slots begin at multiples of a page."""


class Fetcher(Protocol):
    """Where the blobs come from. Called from several threads at a time."""

    def groups(self, experts: Sequence[Expert]) -> Iterable[Sequence[Expert]]:
        """The experts, all of one layer, in the groups that are best fetched with one call each."""

    def fetch(self, experts: Sequence[Expert], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with its expert's whole blob; each is writable and as long as the blob.

        Raises StrataError naming what could not be had and where; what the buffers hold is then
        undefined, and another call may be made for the same experts.
        """

    def close(self) -> None:
        """Free everything. No fetch runs any more, and none begins."""


@frozen
class Fetched:
    """What was fetched so far: blobs, their bytes, seconds that fetches took in all threads.

    `found` counts the views that needed no fetch of their own.
    """

    blobs: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    found: int = 0


@define(eq=False)
class _Slot:
    """Memory for one blob. `holds` counts who uses it; a `grown` one goes back when nobody does."""

    address: int
    region: Region
    grown: bool
    expert: Expert | None = None
    holds: int = 0
    used: int = 0
    landing: Future[None] = field(factory=Future)

    @property
    def idle(self) -> bool:
        """Whether it may be given to another expert."""
        return not self.holds and (self.expert is None or self.landing.done())


class FetchingSource:
    """Implements `interfaces.Source` with a `Fetcher`.

    At most `nbytes` of host memory keep blobs, the least recently used ones making room, but room
    for one blob at least; where more are held at a time than there is room for, memory is taken for
    each and given back on its release. `threads` fetch at the same time. Owns `fetcher`: `close`
    closes it, and so does a constructor that raises.
    """

    def __init__(
        self, context: SourceContext, fetcher: Fetcher, *, nbytes: int, threads: int, purpose: str
    ) -> None:
        self._experts = context.experts
        self._allocator = context.allocator
        self._fetcher = fetcher
        self._purpose = purpose
        self._check = ReadCheck.of(context.experts, context.options)
        self._lock = threading.Lock()
        self._by_expert: dict[Expert, _Slot] = {}
        self._tick = 0
        self._fetched = Fetched()
        self._closed = False
        largest = max(layout.nbytes for layout in context.experts.layouts.values())
        self._stride = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        total = context.experts.count * len(context.experts.layouts)
        count = max(1, min(total, nbytes // self._stride))
        try:
            self._slots = self._reserve(count, grown=False)
        except BaseException:
            fetcher.close()
            raise
        self._pool = ThreadPoolExecutor(threads, "strata-fetch")

    @property
    def fetched(self) -> Fetched:
        """What was fetched so far. Any thread may ask."""
        return self._fetched

    # --- interfaces.Source ---------------------------------------------------------------------

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to fetch the experts that are not here, as far as there is room for them."""
        if layer not in self._experts.layouts:
            return
        wanted = [Expert(layer, i) for i in experts if 0 <= i < self._experts.count]
        with self._lock:
            self._open()
            for expert in wanted:
                if expert in self._by_expert:
                    self._touch(self._by_expert[expert])
            missing = [e for e in dict.fromkeys(wanted) if e not in self._by_expert]
            groups = self._groups(missing[: self._room(wanted)])
            for group in groups:
                slots = [self._claim(expert, wanted) for expert in group]
                self._submit([slot for slot in slots if slot is not None])

    def view(self, expert: Expert) -> View:
        """The blob's place, once it is there; it holds until `release`."""
        layout = self._layout(expert)
        with self._lock:
            self._open()
            slot = self._by_expert.get(expert)
            if slot is None:
                slot = self._claim(expert) or self._grow(expert)
                self._submit([slot])
            elif slot.landing.done():
                self._count(found=1)
            slot.holds += 1
            self._touch(slot)
        self._landed(slot)
        gate, up, down = (slot.address + part.offset for part in layout.parts)
        dma, alias = reach(slot.region, slot.address, layout.nbytes)
        if alias is not None:
            alias += layout.parts[0].offset
        return View((gate, up, down), in_ram=True, dma=dma, alias=alias)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Copy the blob to the buffer's start: from memory where it is there, else fetched."""
        size = self._layout(expert).nbytes
        target = buffer.cast("B")[:size]
        with self._lock:
            self._open()
            slot = self._by_expert.get(expert)
            if slot is not None:
                slot.holds += 1
        if slot is None:
            self._fetch([expert], [target])
            return 0
        self._landed(slot)
        target[:] = bytes_at(slot.address, size).data
        with self._lock:
            self._let_go(slot)
        return 0

    def release(self, expert: Expert) -> None:
        """Give back what `view` acquired; the blob stays while there is room."""
        with self._lock:
            slot = self._by_expert.get(expert)
            if slot is None or not slot.holds:
                raise StrataError(
                    f"{expert} was released and is not held",
                    "each `view` is followed by one `release`",
                    "this is an error in the caller; please report it",
                )
            self._let_go(slot)

    def close(self) -> None:
        """Wait for fetches under way, give all memory back, close the fetcher."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for slot in self._slots:
            if slot.expert is not None and not slot.landing.done():
                slot.landing.set_exception(StrataError(f"{self._purpose} was closed"))
        regions = {slot.region.address: slot.region for slot in self._slots}
        self._slots.clear()
        self._by_expert.clear()
        for region in regions.values():
            self._allocator.release(region)
        self._fetcher.close()

    # --- slots; the lock is held ---------------------------------------------------------------

    def _reserve(self, count: int, *, grown: bool) -> list[_Slot]:
        cuts = [number * self._stride for number in range(count)]
        region = self._allocator.reserve(count * self._stride, cuts, self._purpose)
        return [_Slot(region.address + cut, region, grown) for cut in cuts]

    def _claim(self, expert: Expert, kept: Collection[Expert] = ()) -> _Slot | None:
        """The idle slot that was used the longest ago, for `expert`; None where none is idle.

        Those that have an expert of `kept` do not count.
        """
        idle = (slot for slot in self._slots if slot.idle and slot.expert not in kept)
        slot = min(idle, key=lambda slot: slot.used, default=None)
        return None if slot is None else self._assign(slot, expert)

    def _room(self, kept: Collection[Expert]) -> int:
        """How many times `_claim` has a slot."""
        return sum(slot.idle and slot.expert not in kept for slot in self._slots)

    def _grow(self, expert: Expert) -> _Slot:
        (slot,) = self._reserve(1, grown=True)
        self._slots.append(slot)
        return self._assign(slot, expert)

    def _assign(self, slot: _Slot, expert: Expert) -> _Slot:
        if slot.expert is not None:
            del self._by_expert[slot.expert]
        slot.expert = expert
        slot.landing = Future()
        self._by_expert[expert] = slot
        self._touch(slot)
        return slot

    def _touch(self, slot: _Slot) -> None:
        self._tick += 1
        slot.used = self._tick

    def _let_go(self, slot: _Slot) -> None:
        slot.holds -= 1
        if slot.grown and not slot.holds and not self._closed:
            self._slots.remove(slot)
            if slot.expert is not None:
                del self._by_expert[slot.expert]
            self._allocator.release(slot.region)

    def _forget(self, slot: _Slot) -> None:
        """After a failed fetch: the slot holds nothing, and the expert may be asked for again."""
        if slot.expert is not None:
            self._by_expert.pop(slot.expert, None)
            slot.expert = None
        slot.used = 0

    def _count(self, **more: float) -> None:
        have = self._fetched
        self._fetched = Fetched(
            int(have.blobs + more.get("blobs", 0)),
            int(have.nbytes + more.get("nbytes", 0)),
            have.seconds + more.get("seconds", 0.0),
            int(have.found + more.get("found", 0)),
        )

    def _open(self) -> None:
        if self._closed:
            raise StrataError(f"{self._purpose} was asked for after its source was closed")

    # --- fetching ------------------------------------------------------------------------------

    def _groups(self, experts: list[Expert]) -> list[list[Expert]]:
        """The fetcher's groups. Raises StrataError where it leaves one out or adds one."""
        if not experts:
            return []
        try:
            groups = [list(group) for group in self._fetcher.groups(experts)]
            sound = sorted(e for group in groups for e in group) == sorted(experts)
            why = "the experts in the groups are not those that were given"
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            sound, why = False, describe(error)
        if not sound:
            raise StrataError(
                f"the fetcher of {self._purpose} cannot group experts of layer {experts[0].layer}",
                why,
                "this is a defect of the source's plugin; report it to its authors",
            )
        return groups

    def _submit(self, slots: list[_Slot]) -> None:
        """Have slots that were just assigned filled; the lock is held."""
        # A slot whose fetch failed may be assigned anew before the one who waits is told, so the
        # futures belong to this fetch and not to the slot.
        landings = [slot.landing for slot in slots]
        experts = [slot.expert for slot in slots if slot.expert is not None]
        self._pool.submit(self._land, slots, experts, landings)

    def _land(
        self, slots: list[_Slot], experts: list[Expert], landings: list[Future[None]]
    ) -> None:
        """Fetch into slots, in a thread of the pool; whoever waits learns how it ended."""
        buffers = [
            bytes_at(slot.address, self._experts.layouts[expert.layer].nbytes).data
            for slot, expert in zip(slots, experts, strict=True)
        ]
        try:
            self._fetch(experts, buffers)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the blob is told
            with self._lock:
                for slot in slots:
                    self._forget(slot)
            for landing in landings:
                landing.set_exception(error)
        else:
            for landing in landings:
                landing.set_result(None)

    def _fetch(self, experts: Sequence[Expert], buffers: Sequence[memoryview]) -> None:
        """Fetch and check, in the thread that calls. Raises StrataError."""
        names = ", ".join(map(str, experts))
        begin = time.monotonic()
        try:
            self._fetcher.fetch(experts, buffers)
        except StrataError:
            raise
        except Exception as error:
            raise StrataError(
                f"cannot fetch {names} for {self._purpose}",
                describe(error),
                "this is a defect of the source's plugin; report it to its authors",
            ) from error
        seconds = time.monotonic() - begin
        for expert, buffer in zip(experts, buffers, strict=True):
            self._check.check(expert, buffer)
            for part in self._experts.layouts[expert.layer].parts:
                stored = np.frombuffer(buffer[part.offset : part.offset + part.nbytes], np.uint8)
                check_scales(part.type, stored, str(expert))
        with self._lock:
            self._count(blobs=len(experts), nbytes=sum(map(len, buffers)), seconds=seconds)

    def _landed(self, slot: _Slot) -> None:
        """Wait until the blob is there; the caller's hold is given back where it never is."""
        try:
            slot.landing.result()
        except BaseException:
            with self._lock:
                self._let_go(slot)
            raise

    def _layout(self, expert: Expert) -> BlobLayout:
        layout = self._experts.layouts.get(expert.layer)
        if layout is None or not 0 <= expert.index < self._experts.count:
            raise StrataError(
                f"there is no {expert}",
                f"{self._experts.count} experts in each of {len(self._experts.layouts)} layers",
                "this is an error in the caller; please report it",
            )
        return layout
