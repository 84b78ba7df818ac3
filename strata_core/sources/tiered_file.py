"""The tiered file: the most-read experts in host memory, the rest read unbuffered when asked for.

What is read lies in a ring of cells, enough for every expert of a layer that has no cell of its
own. The system's file cache neither grows nor is trimmed by it.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.abilities import Move
from strata_core.checkpoint.scales import check_scales
from strata_core.errors import StrataError
from strata_core.interfaces import (
    Allocator,
    Expert,
    ExpertFiles,
    Progress,
    Source,
    SourceContext,
    View,
)
from strata_core.memory.address import address_of, bytes_at
from strata_core.memory.platform.direct import BLOCK
from strata_core.pack.reads import ReadCheck
from strata_core.plan.plan import gib
from strata_core.sources.cells import Block, Cell, CellMove, Ring, Tier, cell_of, view_of
from strata_core.sources.copies import CopyCheck
from strata_core.sources.reading import ExpertReader, Placing, Reading
from strata_core.sources.tier_sizes import (
    TierRequest,
    fitting,
    placings,
    ring_sizes,
    starts,
    tier_order,
    tier_request,
)

TIER = "the experts that are read most"
"""Purpose of the memory that keeps experts."""

RING = "experts on their way from the file"
"""Purpose of the memory that experts are read into."""

_LOG = logging.getLogger("strata.sources")


FILLING = 16
"""Experts on their way at once while the tier is filled."""


@define(eq=False)
class _Held:
    """The cells that an expert's views lie in, and how many of the views were given back."""

    cells: list[tuple[Callable[[Cell], None], Cell]] = field(factory=list)
    released: int = 0


class TieredFile:
    """Implements `AdaptiveSource`, `CountingSource`, `PartlyStableSource`; see the module.

    Views are stable until they are released. After a failed read the source is as before, and
    other experts can still be had.
    """

    def __init__(
        self,
        experts: ExpertFiles,
        allocator: Allocator,
        progress: Progress,
        reader: ExpertReader,
        request: TierRequest,
        check: ReadCheck | None = None,
        *,
        verify: bool = False,
    ) -> None:
        """Take the memory and fill the tier. The reader is closed with the source, or on failure.

        Raises StrataError, holding nothing.
        """
        self._experts, self._check, self._reader = experts, check, reader
        self._held: dict[Expert, _Held] = {}
        self._waited = 0.0
        self._version = 0
        self._blocks: list[Block] = []
        self._copies: CopyCheck | None = None
        self._closed = False
        try:
            self._placings = placings(experts)
            shape = (experts.count, 3)
            self._published = {layer: np.zeros(shape, np.uint64) for layer in experts.layouts}
            if verify:
                self._copies = CopyCheck(experts)
            self._take(allocator, request)
            self._fill(progress)
        except BaseException:
            self.close()
            raise

    # making

    def _take(self, allocator: Allocator, request: TierRequest) -> None:
        kept = fitting(request.order, self._placings, request.budget)
        self._kept = tuple(kept)
        ring = ring_sizes(self._experts, self._placings, kept, moving=request.moving)
        self._blocks.append(Block.make(allocator, ring, RING))
        self._ring = Ring(self._blocks[0])
        largest = max(p.nbytes for p in self._placings.values())
        sizes = [self._placings[e].nbytes for e in kept] + [largest] * request.spares
        # registering costs by the call: a slice holds about as many experts as a layer has
        cuts = starts(sizes)[:: self._experts.count]
        self._blocks.append(Block.make(allocator, sizes, TIER, cuts))
        self._tier = Tier(self._blocks[1])

    def _fill(self, progress: Progress) -> None:
        nbytes = {n: layout.nbytes for n, layout in self._experts.layouts.items()}
        progress.start("reading experts", sum(nbytes[e.layer] for e in self._kept))
        waiting: list[tuple[Expert, Cell, Reading]] = []
        try:
            for expert in self._kept:
                placing = self._placings[expert]
                cell = self._tier.take(placing)
                assert cell is not None, "there is a cell for each"
                waiting.append((expert, cell, self._start(expert, placing, cell)))
                if len(waiting) > FILLING:
                    self._landed(*waiting.pop(0))
                    progress.advance(nbytes[expert.layer])
            while waiting:
                expert = waiting[0][0]
                self._landed(*waiting.pop(0))
                progress.advance(nbytes[expert.layer])
        finally:
            for _, _, reading in waiting:
                reading.settle()
            progress.done()

    def _landed(self, expert: Expert, cell: Cell, reading: Reading) -> None:
        reading.wait()
        self._proven(expert, cell)
        assert cell.placing is not None, "it was taken with one"
        layout = self._experts.layouts[expert.layer]
        for part, at in zip(layout.parts, cell.placing.parts, strict=True):
            data = bytes_at(cell.address + at, part.nbytes)
            check_scales(part.type, data, str(expert))
        self._publish(expert, cell)

    def _start(self, expert: Expert, placing: Placing, cell: Cell) -> Reading:
        return self._reader.start(expert, placing, cell.memory[: placing.nbytes])

    def _proven(self, expert: Expert, cell: Cell) -> None:
        """Check bytes that were just read: against the pack's hash, and against the file."""
        assert cell.placing is not None, "only cells with an expert are checked"
        if self._check is not None and self._check.wants(expert) and cell.placing.whole:
            start = cell.placing.parts[0]
            size = self._experts.layouts[expert.layer].nbytes
            self._check.check(expert, cell.memory[start : start + size])
        if self._copies is not None:
            self._copies.check(expert, cell.parts())

    @property
    def kept(self) -> frozenset[Expert]:
        """The experts that have a cell of their own now."""
        return self._tier.experts()

    # serving

    @property
    def stable_version(self) -> int:
        """Changes with every move that is committed."""
        return self._version

    def stable_addresses(self, layer: int) -> NDArray[np.uint64]:
        """The addresses of the experts that the tier keeps; a copy."""
        return self._published[layer].copy()

    def _publish(self, expert: Expert, cell: Cell) -> None:
        self._tier.publish(expert, cell)
        self._published[expert.layer][expert.index] = cell.parts()
        self._version += 1

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read all of them that are not in memory, at the same time."""
        missing = []
        for index in experts:
            expert = Expert(layer, index)
            if expert not in self._tier and self._ring.find(expert) is None:
                missing.append(expert)
        for expert in missing:
            placing = self._placings.get(expert)
            if placing is None or self._fetch(expert, placing) is None:
                return  # `view` says what is wrong with it

    def _fetch(self, expert: Expert, placing: Placing) -> Cell | None:
        cell = self._ring.take(expert, placing)
        if cell is not None:
            cell.reading = self._start(expert, placing, cell)
        return cell

    def view(self, expert: Expert) -> View:
        """Where the expert lies, once it is there."""
        placing = self._placing(expert)
        cell = self._tier.hold(expert)
        region = self._blocks[1].region
        if cell is not None:
            let_go = self._tier.let_go
        else:
            cell, region = self._arrived(expert, placing), self._blocks[0].region
            self._ring.hold(cell)
            let_go = self._ring.let_go
        self._held.setdefault(expert, _Held()).cells.append((let_go, cell))
        return view_of(cell, region)

    def _arrived(self, expert: Expert, placing: Placing) -> Cell:
        """The ring's cell with the expert's bytes."""
        cell = self._ring.find(expert) or self._fetch(expert, placing)
        if cell is None:
            raise StrataError(
                f"there is no room to read {expert}",
                f"all {len(self._blocks[0].cells)} cells of the ring are held",
                "this is an error in the caller; please report it",
            )
        if cell.reading is not None:
            began = time.perf_counter()
            try:
                cell.reading.wait()
                self._proven(expert, cell)
            except BaseException:
                self._ring.drop(cell)
                raise
            finally:
                self._waited += time.perf_counter() - began
            cell.reading = None
        return cell

    def release(self, expert: Expert) -> None:
        """Give a view back; cells are let go when all views of the expert are."""
        held = self._held.get(expert)
        if held is None:
            raise StrataError(
                f"{expert} was given back more often than it was taken",
                "no view of it is held",
                "this is an error in the caller; please report it",
            )
        held.released += 1
        if held.released == len(held.cells):
            del self._held[expert]
            for let_go, cell in held.cells:
                let_go(cell)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """The blob from its cell, or from the file: straight into an aligned buffer."""
        placing = self._placing(expert)
        cell = self._tier.hold(expert)
        if cell is not None:
            try:
                self._gather(expert, placing, cell.memory, buffer)
            finally:
                self._tier.let_go(cell)
            return 0
        size = self._experts.layouts[expert.layer].nbytes
        aligned = address_of(np.frombuffer(buffer, np.uint8)) % BLOCK == 0
        if placing.whole and aligned:
            self._reader.start(expert, placing, buffer[: placing.nbytes]).wait()
            pad = placing.parts[0]
        else:
            # Three ranges do not make one piece of memory, nor does a buffer between two blocks.
            scratch = memoryview(mmap.mmap(-1, placing.nbytes))
            self._reader.start(expert, placing, scratch).wait()
            self._gather(expert, placing, scratch, buffer)
            pad = 0
        if self._check is not None:
            self._check.check(expert, buffer[pad : pad + size])
        return pad

    def _gather(
        self, expert: Expert, placing: Placing, memory: memoryview, buffer: memoryview
    ) -> None:
        """Copy the parts of a cell to a buffer's start, in the layout of a blob."""
        for part, at in zip(self._experts.layouts[expert.layer].parts, placing.parts, strict=True):
            buffer[part.offset : part.offset + part.nbytes] = memory[at : at + part.nbytes]

    def _placing(self, expert: Expert) -> Placing:
        if self._closed:
            raise StrataError(f"{expert} was asked for after the source was closed")
        placing = self._placings.get(expert)
        if placing is None:
            layers = len(self._experts.layouts)
            raise StrataError(
                f"there is no {expert}",
                f"{self._experts.count} experts in each of {layers} layers",
                "this is an error in the caller; please report it",
            )
        return placing

    # keeping in step with devices

    def begin_demote(self, expert: Expert) -> Move | None:
        """A free cell of the tier; None where there is none, or the expert has one already."""
        placing = self._placing(expert)
        if expert in self._tier:
            return None
        cell = self._tier.take(placing)
        if cell is None:
            return None
        dma = view_of(cell, self._blocks[1].region).dma
        return CellMove(expert, "demote", cell.parts(), dma, cell)

    def begin_promote(self, expert: Expert) -> Move | None:
        """The expert's cell serves until `commit`; None where it has none."""
        self._placing(expert)
        return CellMove(expert, "promote", None) if expert in self._tier else None

    def commit(self, move: Move) -> None:
        """Show the demoted expert, or give the promoted one's cell up."""
        if move.kind == "promote":
            self._published[move.expert.layer][move.expert.index] = 0
            self._version += 1
            self._tier.retire(move.expert)
            return
        cell = cell_of(move)
        try:
            if self._copies is not None:
                self._copies.check(move.expert, cell.parts())
        except BaseException:
            self._tier.give(cell)
            raise
        self._publish(move.expert, cell)

    def abort(self, move: Move) -> None:
        """The cell is free again, or stays what it was."""
        if move.kind == "demote":
            self._tier.give(cell_of(move))

    # the end

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """The lane "file": experts and bytes read, microseconds of reading and of waiting for it.

        Filling the tier counts. With STRATA_TIER_VERIFY, also how many copies were compared.
        """
        clock = self._reader.clock
        file = {
            "experts": clock.experts,
            "bytes": clock.nbytes,
            "read_us": int(clock.busy * 1e6),
            "wait_us": int(self._waited * 1e6),
        }
        if self._copies is not None:
            file |= {"verified": self._copies.compared, "differ": self._copies.differ}
        return {"file": file}

    def close(self) -> None:
        """Wait for what is on its way, and give the memory back."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        if self._copies is not None:
            self._copies.close()
        for block in self._blocks:
            block.close()


def build(context: SourceContext) -> Source:
    """The source of the record `tiered-file`; fills the tier before it returns."""
    experts, options = context.experts, context.options
    order = tier_order(context.ranking, context.excluded, experts)
    budget = context.budget or 0
    paths = {piece.file for expert in order for piece in experts.pieces(expert)}
    request = tier_request(context, order, budget)
    source = TieredFile(
        experts,
        context.allocator,
        context.progress,
        ExpertReader.open(sorted(paths), context.degrade),
        request,
        ReadCheck.of(experts, options),
        verify=bool(options.get("tier_verify")),
    )
    kept = len(source.kept)
    _LOG.info(
        "tiered file: %d experts in memory (%s), %d read unbuffered from the file",
        kept,
        gib(sum(experts.layouts[expert.layer].nbytes for expert in source.kept)),
        len(order) - kept,
    )
    return source
