"""The mapped file: experts are used where the operating system maps them; nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_core.interfaces import Expert, ExpertFiles, Source, SourceContext, View
from strata_core.memory.address import address_of


class MappedFile:
    """Views into the model's mapped files. Pages come and go as the system's file cache decides."""

    def __init__(self, experts: ExpertFiles) -> None:
        self._experts = experts

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
        layout = self._experts.layouts[expert.layer]
        for part, data in zip(layout.parts, self._experts.mapped(expert), strict=True):
            buffer[part.offset : part.offset + part.nbytes] = data.data
        return 0

    def release(self, expert: Expert) -> None:
        """Nothing to do: the mapping stays until the checkpoint is closed."""

    def close(self) -> None:
        """Nothing of its own to free."""


def build(context: SourceContext) -> Source:
    """The source of the record `mmap`."""
    return MappedFile(context.experts)
