"""The resident complement: the experts that no device holds, in host memory that devices reach.

What a memory budget leaves out is read from the mapped file. An expert that lies in no single
page-locked slice as a whole belongs to the CPU. Where experts change places with those on a device,
the one that leaves is copied into an empty place, and the one that enters leaves its own empty: no
file is read for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.abilities import Move
from strata_core.interfaces import (
    Allocator,
    Expert,
    ExpertFiles,
    Progress,
    Source,
    SourceContext,
    View,
)
from strata_core.memory.platform.pages import PageHints
from strata_core.memory.rules import COMPLEMENT
from strata_core.pack.reads import ReadCheck
from strata_core.plan.lending import lendable
from strata_core.plan.moving import Pace, slot_bytes, spares_by_size
from strata_core.plan.plan import gib
from strata_core.sources.arena import Arena, stride
from strata_core.sources.copies import CopyCheck
from strata_core.sources.mmap import MappedFile, useful_hints

_LOG = logging.getLogger("strata.sources")


class SlicedPinned:
    """Experts in memory, all others from the mapped file; implements `AdaptiveSource`.

    It begins with `held`, with empty places of the sizes in `spare`, for experts that leave a
    device, and in `last`, for those whose slots prompts borrow. Addresses hold until `close`, or
    until a move of the expert is committed. `verify`: compare copies with the file.
    """

    def __init__(
        self,
        experts: ExpertFiles,
        allocator: Allocator,
        progress: Progress,
        held: frozenset[Expert],
        check: ReadCheck | None = None,
        page_hints: PageHints | None = None,
        *,
        spare: Mapping[int, int] | None = None,
        last: Mapping[int, int] | None = None,
        verify: bool = False,
    ) -> None:
        self._experts, self._check = experts, check
        self._mapped = MappedFile(experts, page_hints)
        self._arena: Arena | None = None
        self._copies = CopyCheck(experts) if verify else None
        try:
            if held:
                self._arena = Arena(
                    experts,
                    allocator,
                    progress,
                    check,
                    held=held,
                    spare=spare,
                    last=last,
                    purpose=COMPLEMENT,
                )
            if self._copies is not None:
                for expert in sorted(held):
                    self._copies.check(expert, self.view(expert).parts)
        except BaseException:
            self.close()
            raise

    @property
    def page_hints(self) -> PageHints | None:
        """Those of the mapped file."""
        return self._mapped.page_hints

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing to do: pages of the file are read when they are first touched."""

    def view(self, expert: Expert) -> View:
        """The blob's place in memory, or its parts where the file is mapped."""
        return self._of(expert).view(expert)

    def addresses(self, layer: int) -> NDArray[np.uint64]:
        """Every expert's addresses; they hold until `close`, or until a move of it is committed."""
        places = [self.view(Expert(layer, i)).parts for i in range(self._experts.count)]
        return np.array(places, np.uint64)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Copy the blob to the buffer's start; what comes from the file is checked as it is read.

        Raises StrataError for an expert that is damaged.
        """
        source = self._of(expert)
        pad = source.read_into(expert, buffer)
        if self._check is not None and source is self._mapped:
            self._check.check(expert, buffer[: self._experts.layouts[expert.layer].nbytes])
        return pad

    def release(self, expert: Expert) -> None:
        """Nothing to do: addresses stay."""

    # keeping in step with devices

    def begin_demote(self, expert: Expert) -> Move | None:
        """An empty place; None where there is none, or the expert has one already."""
        layout = self._experts.layouts[expert.layer]
        if self._arena is None or expert in self._arena.places:
            return None
        start = self._arena.places.take(layout.nbytes)
        if start is None:
            return None
        address, dma = self._arena.reach(start, layout.nbytes)
        gate, up, down = (address + part.offset for part in layout.parts)
        return _PlaceMove(expert, "demote", (gate, up, down), dma, start)

    def begin_promote(self, expert: Expert) -> Move | None:
        """The expert's place serves until `commit`; None where it has none."""
        if self._arena is None or expert not in self._arena.places:
            return None
        return _PlaceMove(expert, "promote", None)

    def commit(self, move: Move) -> None:
        """Show the demoted expert in its place, or have the promoted one's be empty."""
        assert self._arena is not None, "a source is given its own moves"
        if move.kind == "promote":
            self._arena.places.drop(move.expert)
            return
        start = _start_of(move)
        try:
            if self._copies is not None:
                assert move.parts is not None, "a demoted expert has a place"
                self._copies.check(move.expert, move.parts)
        except BaseException:
            self._arena.places.give(start)
            raise
        self._arena.places.put(move.expert, start)

    def abort(self, move: Move) -> None:
        """The place is empty again, or stays what it was."""
        if move.kind == "demote":
            assert self._arena is not None, "a source is given its own moves"
            self._arena.places.give(_start_of(move))

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """With STRATA_TIER_VERIFY the lane "file": how many copies were compared, and differ."""
        if self._copies is None:
            return {}
        found = {"experts": 0, "bytes": 0}
        found |= {"verified": self._copies.compared, "differ": self._copies.differ}
        return {"file": found}

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()
        if self._copies is not None:
            self._copies.close()

    def _of(self, expert: Expert) -> Arena | MappedFile:
        if self._arena is not None and expert in self._arena.places:
            return self._arena
        return self._mapped


@frozen(eq=False)
class _PlaceMove(Move):
    """A move that knows its place."""

    start: int | None = None


def _start_of(move: Move) -> int:
    assert isinstance(move, _PlaceMove), "a source is given its own moves"
    assert move.start is not None, "a demoted expert has a place"
    return move.start


def residents(
    experts: ExpertFiles, wanted: Iterable[Expert], budget: int | None
) -> frozenset[Expert]:
    """The first of `wanted` that fit into `budget` bytes; the first that does not ends it."""
    held: set[Expert] = set()
    left = budget
    for expert in wanted:
        if left is not None:
            left -= stride(experts.layouts[expert.layer])
            if left < 0:
                break
        held.add(expert)
    return frozenset(held)


def _for_prompts(context: SourceContext, left: int | None) -> dict[int, int]:
    """Empty places by size for experts whose slots prompts borrow, in `left` bytes (None: any).

    So that they come back from memory, not from the file: from the large ones down, as caches lend.
    """
    experts = context.experts
    total, layers = experts.count * len(experts.layouts), len(experts.layouts)
    sizes = sorted((slot_bytes(experts.layouts[e.layer]) for e in context.excluded), reverse=True)
    found: dict[int, int] = {}
    for size in sizes[: lendable(len(sizes), total, layers)]:
        if left is not None:
            left -= size
            if left < 0:
                break
        found[size] = found.get(size, 0) + 1
    return found


def build(context: SourceContext) -> Source:
    """The source of the record `sliced-pinned`; reads its experts before it returns."""
    experts = context.experts
    ranking: Iterable[Expert] = (
        context.ranking
        if context.ranking is not None
        else (Expert(layer, i) for i in range(experts.count) for layer in experts.layouts)
    )
    wanted = [expert for expert in ranking if expert not in context.excluded]
    limit = context.options.get("resident_budget_gib")
    at_once = Pace.of(context.options).at_once
    spare = spares_by_size(context.excluded, experts.layouts, experts.count, at_once)
    room = sum(size * count for size, count in spare.items())
    budget = None if limit is None else int(limit * 2**30) - room
    held = residents(experts, wanted, budget)
    taken = sum(stride(experts.layouts[e.layer]) for e in held)
    rooms = [budget, None if context.budget is None else context.budget - room]
    left = min((most - taken for most in rooms if most is not None), default=None)
    last = _for_prompts(context, left if len(held) == len(wanted) else 0)
    _LOG.info(
        "resident experts: %d in memory (%s), %d on devices, %d read from the mapped file",
        len(held),
        gib(sum(experts.layouts[expert.layer].nbytes for expert in held)),
        len(context.excluded),
        len(wanted) - len(held),
    )
    check = ReadCheck.of(experts, context.options)
    # what is held is read from the file as well, once
    hints = useful_hints(experts, context.machine) if len(held) < len(wanted) else None
    return SlicedPinned(
        experts,
        context.allocator,
        context.progress,
        held,
        check,
        hints,
        spare=spare,
        last=last,
        verify=bool(context.options.get("tier_verify")),
    )
