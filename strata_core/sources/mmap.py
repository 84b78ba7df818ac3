"""The mapped file: experts are used where the operating system maps them; nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_core.interfaces import Expert, ExpertFiles, Source, SourceContext, View
from strata_core.machine import Machine
from strata_core.memory.address import address_of
from strata_core.memory.platform.pages import PageHints, page_hints


class MappedFile:
    """Views into the model's mapped files. Pages come and go as the system's file cache decides.

    With `page_hints` the system is told which pages come next, and reads no others beside them.
    """

    def __init__(self, experts: ExpertFiles, page_hints: PageHints | None = None) -> None:
        self._experts = experts
        self.page_hints = page_hints
        if page_hints is not None:
            self._advise_all(page_hints)

    def _advise_all(self, hints: PageHints) -> None:
        for layer in self._experts.layouts:
            for index in range(self._experts.count):
                for data in self._experts.mapped(Expert(layer, index)):
                    hints.advise(address_of(data), data.nbytes, hints.random)

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing to do: a page is read when it is first touched."""

    def view(self, expert: Expert) -> View:
        """The three parts where they are mapped; they may have to be read from the file first."""
        gate, up, down = self._experts.mapped(expert)
        return View((address_of(gate), address_of(up), address_of(down)), in_ram=False)

    def addresses(self, layer: int) -> NDArray[np.uint64]:
        """Every expert's addresses; they hold until `close`."""
        places = [self.view(Expert(layer, i)).parts for i in range(self._experts.count)]
        return np.array(places, np.uint64)

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Copy the three parts to the buffer's start, in the layout of a blob."""
        layout, mapped = self._experts.layouts[expert.layer], self._experts.mapped(expert)
        if self.page_hints is not None:
            for data in mapped:
                self.page_hints.advise(address_of(data), data.nbytes, self.page_hints.will_need)
        for part, data in zip(layout.parts, mapped, strict=True):
            buffer[part.offset : part.offset + part.nbytes] = data.data
        return 0

    def release(self, expert: Expert) -> None:
        """Nothing to do: the mapping stays until the checkpoint is closed."""

    def close(self) -> None:
        """Nothing of its own to free."""


def useful_hints(experts: ExpertFiles, machine: Machine) -> PageHints | None:
    """Page hints where the experts do not fit in memory; else a page is read once anyway."""
    nbytes = sum(layout.nbytes for layout in experts.layouts.values()) * experts.count
    return page_hints() if nbytes > machine.memory_available else None


def build(context: SourceContext) -> Source:
    """The source of the record `mmap`."""
    return MappedFile(context.experts, useful_hints(context.experts, context.machine))
