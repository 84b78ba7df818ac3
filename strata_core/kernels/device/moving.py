"""The table of cells of a cache whose experts change places: a copy in page-locked memory."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from strata_core.cache.amount import few_buffers
from strata_core.cache.staging import Staging
from strata_core.cache.swaps import BUFFERS
from strata_core.errors import Degradation, Refused
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.layout import CELL
from strata_core.kernels.device.regions import Regions
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held


@frozen
class Moving:
    """Page-locked memory for experts that change places: a table of cells, and buffers for blobs.

    The table is at `mirror` and lies as the cells do on the device from `target`, `nbytes` in all.
    """

    mirror: int
    target: int
    nbytes: int
    buffers: tuple[int, ...]

    @classmethod
    def take(
        cls,
        held: Held,
        device: int,
        mirror: int,
        span: tuple[int, int],
        staging: Staging,
        degrade: Callable[[Degradation], None],
    ) -> Moving:
        """The table at `mirror`, for a `span` of the device (address, bytes), and its buffers.

        Where the driver pins no more, they are those of `staging`, which is told.
        """
        try:
            purpose = "buffers that experts change places through"
            address = held.pinned(BUFFERS * staging.nbytes, purpose, small=False)
            buffers = tuple(address + n * staging.nbytes for n in range(BUFFERS))
        except Refused as error:
            # those of filling serve too: prompts use them, but swaps rest while one is computed
            buffers = staging.addresses
            degrade(few_buffers(f"{held.runtime.label}{device}", len(buffers), error))
        return cls(mirror, *span, buffers)

    def take_over(self, cells: Cells, regions: Regions, *, fixed: bool) -> None:
        """Have the cells lie where one copy brings them to the device.

        `regions` are the device's; `fixed`: no expert's host place ever changes.
        """
        bytes_at(self.mirror, self.nbytes)[:] = 0
        for layer, table in cells.layers.items():
            if f"cells {layer}" in regions:
                at = self.mirror + regions.at(f"cells {layer}") - self.target
                mirrored = bytes_at(at, table.nbytes).view(CELL)
                mirrored[:] = table
                cells.layers[layer] = mirrored
        cells.moving = True
        cells.places_linked = fixed and all(t["alias"].all() for t in cells.layers.values())
