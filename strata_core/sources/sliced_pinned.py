"""The resident complement: the experts that no device holds, in host memory that devices reach.

What a memory budget leaves out is read from the mapped file. An expert that lies in no single
page-locked slice as a whole belongs to the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

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
from strata_core.plan.plan import gib
from strata_core.sources.arena import Arena, stride
from strata_core.sources.mmap import MappedFile, useful_hints

_LOG = logging.getLogger("strata.sources")


class SlicedPinned:
    """`held` experts from memory, all others from the mapped file; addresses hold until `close`."""

    def __init__(
        self,
        experts: ExpertFiles,
        allocator: Allocator,
        progress: Progress,
        held: frozenset[Expert],
        check: ReadCheck | None = None,
        page_hints: PageHints | None = None,
    ) -> None:
        self._experts, self._held = experts, held
        self._mapped = MappedFile(experts, page_hints)
        self._arena: Arena | None = None
        if held:
            self._arena = Arena(experts, allocator, progress, check, held=held, purpose=COMPLEMENT)

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
        """Every expert's addresses; they hold until `close`."""
        places = [self.view(Expert(layer, i)).parts for i in range(self._experts.count)]
        return np.array(places, np.uint64)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Copy the blob to the buffer's start."""
        return self._of(expert).read_into(expert, buffer)

    def release(self, expert: Expert) -> None:
        """Nothing to do: addresses stay."""

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()

    def _of(self, expert: Expert) -> Arena | MappedFile:
        if self._arena is not None and expert in self._held:
            return self._arena
        return self._mapped


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
    held = residents(experts, wanted, None if limit is None else int(limit * 2**30))
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
    return SlicedPinned(experts, context.allocator, context.progress, held, check, hints)
