"""The resident arena: experts copied once into host memory, then served from there.

Where the allocator page-locks memory, each layer begins on a page and is a slice of its own, and
layers are read in while later ones are still being made ready.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from strata_core.checkpoint.positioned import Reader
from strata_core.checkpoint.scales import check_scales
from strata_core.errors import StrataError
from strata_core.interfaces import (
    Allocator,
    BlobLayout,
    Expert,
    ExpertFiles,
    Progress,
    Region,
    Source,
    SourceContext,
    View,
)
from strata_core.memory.address import bytes_at
from strata_core.memory.preparing import Prepared, prepare
from strata_core.memory.rules import ARENA
from strata_core.memory.spans import reach
from strata_core.pack.reads import ReadCheck
from strata_core.sources.places import Places

BLOB_ALIGNMENT = 64
"""Blobs start at multiples of a cache line."""

READERS = 4
"""Threads that copy layers in at start; reads release the interpreter lock."""


class Arena:
    """Blobs in one region, layer by layer; views are stable until `close`.

    `held` are the experts that it keeps, by default all; it has no others, but those that are put
    into `places` later, of which `spare` begin empty, by size, and `last` behind the experts.
    `purpose` is what its memory is reserved for.
    """

    def __init__(
        self,
        experts: ExpertFiles,
        allocator: Allocator,
        progress: Progress,
        check: ReadCheck | None = None,
        *,
        held: Collection[Expert] | None = None,
        spare: Mapping[int, int] | None = None,
        last: Mapping[int, int] | None = None,
        purpose: str = ARENA,
    ) -> None:
        self._experts = experts
        self._check = check
        self._region: Region | None = None
        self.places, cuts, end = _places(experts, held, spare or {}, last or {})
        self._memory: Prepared | None = prepare(allocator, end, cuts, purpose)
        try:
            kept = self.places.experts()
            self._fill(sum(experts.layouts[each.layer].nbytes for each in kept), progress)
            self._region = self._memory.region()
        except BaseException:
            self.close()
            raise

    def _fill(self, total: int, progress: Progress) -> None:
        progress.start("reading experts", total)
        try:
            with Reader() as reader, ThreadPoolExecutor(READERS, "strata-arena") as pool:
                layers = self._experts.layouts
                jobs = [pool.submit(self._fill_layer, i, reader, progress) for i in layers]
                try:
                    for job in jobs:
                        job.result()
                finally:
                    for job in jobs:
                        job.cancel()
        finally:
            progress.done()

    def _fill_layer(self, layer: int, reader: Reader, progress: Progress) -> None:
        layout = self._experts.layouts[layer]
        for index in range(self._experts.count):
            expert = Expert(layer, index)
            start = self.places.start(expert)
            if self._memory is None or start is None:
                continue
            self._memory.wait(start, layout.nbytes)
            target = bytes_at(self._address(expert), layout.nbytes).data
            self._read(expert, reader, target)
            if self._check is not None:
                self._check.check(expert, target)
            for part in layout.parts:
                stored = np.frombuffer(target[part.offset : part.offset + part.nbytes], np.uint8)
                check_scales(part.type, stored, str(expert))
            progress.advance(layout.nbytes)

    def _read(self, expert: Expert, reader: Reader, target: memoryview) -> None:
        parts = self._experts.layouts[expert.layer].parts
        for part, piece in zip(parts, self._experts.pieces(expert), strict=True):
            reader.read(piece, target[part.offset : part.offset + part.nbytes], str(expert))

    def _address(self, expert: Expert) -> int:
        return self._at(expert, self.places.start(expert))

    def _at(self, expert: Expert, start: int | None) -> int:
        if self._memory is None:
            raise StrataError(f"{expert} was asked for after the arena was closed")
        if start is None:
            raise StrataError(
                f"there is no {expert}",
                f"{self._experts.count} experts in each of {len(self._experts.layouts)} layers",
                "this is an error in the caller; please report it",
            )
        return self._memory.address + start

    def reach(self, start: int, nbytes: int) -> tuple[int, bool]:
        """The address of a place, and whether a copy engine may use its first bytes."""
        assert self._memory is not None, "an open arena is asked"
        address = self._memory.address + start
        return address, self._region is not None and reach(self._region, address, nbytes)[0]

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing to do: everything is in memory."""

    def view(self, expert: Expert) -> View:
        """The blob's place in the arena; devices reach it where one span holds it whole."""
        start = self._address(expert)
        layout = self._experts.layouts[expert.layer]
        gate, up, down = layout.parts
        dma, alias = False, None
        if self._region is not None:
            dma, alias = reach(self._region, start, layout.nbytes)
        if alias is not None:
            alias += gate.offset
        parts = (start + gate.offset, start + up.offset, start + down.offset)
        return View(parts, in_ram=True, dma=dma, alias=alias)

    def addresses(self, layer: int) -> NDArray[np.uint64]:
        """Every expert's addresses; they hold until `close`."""
        places = [self.view(Expert(layer, i)).parts for i in range(self._experts.count)]
        return np.array(places, np.uint64)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Copy the blob to the buffer's start."""
        start = self.places.hold(expert)
        try:
            size = self._experts.layouts[expert.layer].nbytes
            buffer[:size] = bytes_at(self._at(expert, start), size).data
        finally:
            if start is not None:
                self.places.let_go(start)
        return 0

    def release(self, expert: Expert) -> None:
        """Nothing to do: a blob stays where it is."""

    def close(self) -> None:
        """Give the memory back."""
        memory, self._memory, self._region = self._memory, None, None
        if memory is not None:
            memory.close()


def _places(
    experts: ExpertFiles,
    held: Collection[Expert] | None,
    spare: Mapping[int, int],
    last: Mapping[int, int],
) -> tuple[Places, list[int], int]:
    """The places, where layers begin, and where all of it ends.

    Empty places of `spare` come first, so that they are page-locked where anything is; those of
    `last` come behind the experts.
    """
    starts: dict[Expert, int] = {}
    sizes: dict[int, int] = {}
    cuts: list[int] = []
    end = _add_empty(sizes, 0, spare)
    for layer, layout in experts.layouts.items():
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        cuts.append(end)
        for index in range(experts.count):
            expert = Expert(layer, index)
            if held is None or expert in held:
                starts[expert] = end
                sizes[end] = stride(layout)
                end += stride(layout)
    if last:
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        cuts.append(end)
        end = _add_empty(sizes, end, last)
    return Places(starts, sizes), cuts, end


def _add_empty(sizes: dict[int, int], end: int, counts: Mapping[int, int]) -> int:
    """Add empty places by size behind `end`; where they end."""
    for nbytes in (size for size, count in counts.items() for _ in range(count)):
        sizes[end] = nbytes
        end += nbytes
    return end


def stride(layout: BlobLayout) -> int:
    """Bytes from one blob's start to the next one's."""
    return -(-layout.nbytes // BLOB_ALIGNMENT) * BLOB_ALIGNMENT


def build(context: SourceContext) -> Source:
    """The source of the record `arena`; reads every expert before it returns."""
    check = ReadCheck.of(context.experts, context.options)
    return Arena(context.experts, context.allocator, context.progress, check)
