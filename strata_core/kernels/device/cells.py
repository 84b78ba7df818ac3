"""Where each expert is for a device: the table that `assign` reads, one part for each layer.

It changes between rounds only; `version` counts its changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.cache.slots import SlotPool
from strata_core.cache.staging import Staging
from strata_core.interfaces import BlobLayout, Expert
from strata_core.kernels.device.layout import CELL
from strata_core.kernels.device.regions import Regions

Aliases = Mapping[Expert, tuple[int, int, int]]
"""Addresses of gate, up and down in host memory, as a device sees them."""


@define(eq=False)
class Cells:
    """The table on the host, CELL [experts] by layer.

    `moving`: any expert may have to be computed elsewhere in a later version. `places_linked`: what
    is in no slot of this device is reached over the link then too, wherever it lies.
    """

    layers: dict[int, NDArray[np.void]]
    moving: bool = False
    places_linked: bool = False
    version: int = field(default=0)

    @classmethod
    def make(
        cls,
        layouts: Mapping[int, BlobLayout],
        experts: int,
        pool: SlotPool | None,
        helpers: Mapping[int, SlotPool] | None = None,
        aliases: Aliases | None = None,
    ) -> Cells:
        """The table for the device of `pool`; `helpers` are the helpers' pools by number."""
        layers = {layer: np.zeros(experts, CELL) for layer in layouts}
        for expert, address in (pool.places if pool else {}).items():
            offsets = [part.offset for part in layouts[expert.layer].parts]
            layers[expert.layer]["slot"][expert.index] = [address + o for o in offsets]
        for number, helper in (helpers or {}).items():
            for expert in helper.places:
                layers[expert.layer]["helper"][expert.index] = number
        for expert, parts in (aliases or {}).items():
            layers[expert.layer]["alias"][expert.index] = parts
        return cls(layers)

    def put(self, staging: Staging, regions: Regions, device: int) -> None:
        """Bring every layer's part that a device has a region for there; `staging` orders it."""
        for layer, table in self.layers.items():
            if f"cells {layer}" in regions:
                target = regions.at(f"cells {layer}")
                staging.put(device, target, table.view(np.uint8).reshape(-1))

    def fill(self, expert: Expert, parts: tuple[int, int, int]) -> None:
        """The expert's matrices are at these addresses in the device's memory."""
        self.layers[expert.layer]["slot"][expert.index] = parts

    def empty(self, expert: Expert) -> None:
        """The expert is in no slot."""
        self.layers[expert.layer]["slot"][expert.index] = 0

    def saved(self, expert: Expert) -> bytes:
        """All that is known of the expert, for `restore`."""
        found: bytes = self.layers[expert.layer][expert.index].tobytes()
        return found

    def restore(self, expert: Expert, cell: bytes) -> None:
        """What was known of the expert is so again."""
        self.layers[expert.layer][expert.index] = np.frombuffer(cell, CELL)[0]

    @staticmethod
    def slot_span(expert: Expert) -> tuple[int, int]:
        """Where in its layer's part the expert's slot stands, and the bytes of that."""
        fields = CELL.fields
        assert fields is not None, "a cell has named parts"
        kind, offset = fields["slot"][:2]
        return expert.index * CELL.itemsize + offset, kind.itemsize

    def link(self, expert: Expert, parts: tuple[int, int, int] | None) -> None:
        """The device finds the expert at these addresses over the link; None: it does not."""
        self.layers[expert.layer]["alias"][expert.index] = parts or 0

    def away(self) -> Iterator[Expert]:
        """Experts that no device holds."""
        for layer, table in self.layers.items():
            here = (table["slot"][:, 0] != 0) | (table["helper"] != 0)
            for index in np.flatnonzero(~here).tolist():
                yield Expert(layer, index)

    def cannot_link(self) -> bool:
        """Whether there are experts in no slot and with no helper, and not one has an alias."""
        missing = False
        for table in self.layers.values():
            away = (table["slot"][:, 0] == 0) & (table["helper"] == 0)
            if (away & (table["alias"][:, 0] != 0)).any():
                return False
            missing |= bool(away.any())
        return missing

    def shared_layers(self, *, link_takes_all: bool) -> frozenset[int]:
        """Layers in which the CPU or a helper may have to compute.

        `link_takes_all`: every miss that has an alias goes over the link.
        """
        if self.moving and not (link_takes_all and self.places_linked):
            return frozenset(self.layers)
        found = set()
        for layer, table in self.layers.items():
            own = table["slot"][:, 0] != 0
            if link_takes_all:
                own |= (table["alias"][:, 0] != 0) & (table["helper"] == 0)
            if not own.all():
                found.add(layer)
        return frozenset(found)

    def host_layers(self, *, link_takes_all: bool) -> frozenset[int]:
        """Layers in which the CPU may have to compute."""
        if self.moving and not (link_takes_all and self.places_linked):
            return frozenset(self.layers)
        found = set()
        for layer, table in self.layers.items():
            elsewhere = (table["slot"][:, 0] != 0) | (table["helper"] != 0)
            if link_takes_all:
                elsewhere |= table["alias"][:, 0] != 0
            if not elsewhere.all():
                found.add(layer)
        return frozenset(found)
