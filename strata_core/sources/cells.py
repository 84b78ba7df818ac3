"""Cells of host memory that hold one expert each, and who uses them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field, frozen

from strata_core.abilities import Move
from strata_core.interfaces import Allocator, Expert, Region, View
from strata_core.memory.address import bytes_at
from strata_core.memory.platform.direct import BLOCK
from strata_core.memory.spans import reach
from strata_core.sources.reading import Placing, Reading


@define(eq=False)
class Cell:
    """`nbytes` at `address`, block-aligned; `memory` is the same as a writable view.

    `expert` is whose bytes lie there by `placing` once `reading` is done. `holders` use it now; one
    that is `retired` is free when the last of them is gone.
    """

    address: int
    nbytes: int
    memory: memoryview
    expert: Expert | None = None
    placing: Placing | None = None
    reading: Reading | None = None
    holders: int = 0
    retired: bool = False

    def parts(self) -> tuple[int, int, int]:
        """Host addresses of gate, up and down."""
        assert self.placing is not None, "only cells with an expert are asked"
        gate, up, down = self.placing.parts
        return self.address + gate, self.address + up, self.address + down


@define(eq=False)
class Block:
    """A region of the allocator, cut into cells. `close` gives it back; no cell is used then."""

    allocator: Allocator
    region: Region | None
    cells: list[Cell]

    @classmethod
    def make(
        cls, allocator: Allocator, sizes: Sequence[int], purpose: str, cuts: Sequence[int] = ()
    ) -> Block:
        """One cell of each size, multiples of BLOCK. Raises StrataError, holding nothing."""
        total = sum(sizes)
        if not total:
            return cls(allocator, None, [])
        region = allocator.reserve(total, cuts, purpose)
        memory = bytes_at(region.address, total).data
        cells, at = [], 0
        for nbytes in sizes:
            assert nbytes % BLOCK == 0, "cells are whole blocks"
            cells.append(Cell(region.address + at, nbytes, memory[at : at + nbytes]))
            at += nbytes
        return cls(allocator, region, cells)

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        region, self.region = self.region, None
        self.cells.clear()
        if region is not None:
            self.allocator.release(region)


@define(eq=False)
class Ring:
    """Cells for experts on their way from the file, the longest unused one taken first.

    An expert stays in its cell until that is needed for another, so what is asked for again soon is
    not read again. Used by one thread.
    """

    block: Block
    _idle: OrderedDict[int, Cell] = field(init=False)
    _by_expert: dict[Expert, Cell] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._idle = OrderedDict((cell.address, cell) for cell in self.block.cells)

    def find(self, expert: Expert) -> Cell | None:
        """The cell that an expert is in or on its way to; it counts as just used.

        One that did not get there is forgotten, so that it can be read anew.
        """
        cell = self._by_expert.get(expert)
        if cell is not None and cell.reading is not None and cell.reading.failed:
            self.drop(cell)
            return None
        if cell is not None and not cell.holders:
            self._idle.move_to_end(cell.address)
        return cell

    def take(self, expert: Expert, placing: Placing) -> Cell | None:
        """A cell for another expert, nothing on its way to it; None where all are held."""
        cell = next(
            (c for c in self._idle.values() if c.nbytes >= placing.nbytes and not _moving(c)),
            None,
        ) or next((c for c in self._idle.values() if c.nbytes >= placing.nbytes), None)
        if cell is None:
            return None
        self.drop(cell)
        self._idle.move_to_end(cell.address)
        cell.expert, cell.placing = expert, placing
        self._by_expert[expert] = cell
        return cell

    def drop(self, cell: Cell) -> None:
        """Forget what a cell holds, after waiting for what is on its way there."""
        if cell.reading is not None:
            cell.reading.settle()
        if cell.expert is not None:
            del self._by_expert[cell.expert]
        cell.expert = cell.placing = cell.reading = None

    def hold(self, cell: Cell) -> None:
        """Count a holder; a held cell is not taken."""
        cell.holders += 1
        self._idle.pop(cell.address, None)

    def let_go(self, cell: Cell) -> None:
        """Count a holder less."""
        cell.holders -= 1
        if not cell.holders:
            self._idle[cell.address] = cell

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for cell in self.block.cells:
            if cell.reading is not None:
                cell.reading.settle()


def _moving(cell: Cell) -> bool:
    return cell.reading is not None and not cell.reading.done


@define(eq=False)
class Tier:
    """Cells that keep their experts until these are given up. Any thread may call it.

    A cell found through `hold` keeps its bytes until `let_go`.
    """

    block: Block
    _of: dict[Expert, Cell] = field(factory=dict, init=False)
    _free: list[Cell] = field(init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(self.block.cells)

    def experts(self) -> frozenset[Expert]:
        """Those that are kept now."""
        with self._lock:
            return frozenset(self._of)

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._of

    def hold(self, expert: Expert) -> Cell | None:
        """The expert's cell, kept until `let_go`; None where it has none."""
        with self._lock:
            cell = self._of.get(expert)
            if cell is not None:
                cell.holders += 1
            return cell

    def let_go(self, cell: Cell) -> None:
        """End one `hold`."""
        with self._lock:
            cell.holders -= 1
            if cell.retired and not cell.holders:
                self._clear(cell)

    def take(self, placing: Placing) -> Cell | None:
        """The smallest free cell that is large enough, no longer free; None without one."""
        with self._lock:
            fitting = [cell for cell in self._free if cell.nbytes >= placing.nbytes]
            if not fitting:
                return None
            cell = min(fitting, key=lambda cell: cell.nbytes)
            self._free.remove(cell)
            cell.placing = placing
            return cell

    def give(self, cell: Cell) -> None:
        """A cell that was taken and not published is free again."""
        with self._lock:
            self._clear(cell)

    def publish(self, expert: Expert, cell: Cell) -> None:
        """From now on the expert is found in the cell, whose bytes are complete."""
        with self._lock:
            cell.expert = expert
            self._of[expert] = cell

    def retire(self, expert: Expert) -> None:
        """The expert is no longer found; its cell is free once nobody holds it."""
        with self._lock:
            cell = self._of.pop(expert)
            cell.retired = True
            if not cell.holders:
                self._clear(cell)

    def _clear(self, cell: Cell) -> None:
        cell.expert = cell.placing = None
        cell.retired = False
        self._free.append(cell)


@frozen(eq=False)
class CellMove(Move):
    """A move that knows its cell; one into a device's memory has none."""

    cell: Cell | None = None


def cell_of(move: Move) -> Cell:
    """The cell that a demoted expert is copied to."""
    assert isinstance(move, CellMove), "a source is given its own moves"
    assert move.cell is not None, "a demoted expert has one"
    return move.cell


def view_of(cell: Cell, region: Region | None) -> View:
    """What a cell of a region shows."""
    parts = cell.parts()
    dma, alias = False, None
    if region is not None:
        dma, alias = reach(region, cell.address, cell.nbytes)
    if alias is not None:
        alias += parts[0] - cell.address
    return View(parts, in_ram=True, dma=dma, alias=alias)
