"""What lanes served, by layer: what the device tells at the end of each round, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.kernels.device.layout import HIT, HOST, LINK

_NAMES = {HIT: "hit", LINK: "pcie", HOST: "cpu"}


@define(eq=False)
class Served:
    """Entries since the start, of rounds that count; one thread keeps them, and any may ask.

    `told`: uint64 [layers, LANES] in one piece, which the device writes; `nbytes` are those of an
    expert of each layer.
    """

    told: NDArray[np.uint64]
    nbytes: Sequence[int]
    _bytes: memoryview = field(init=False)
    _kept: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._bytes = self.told.reshape(-1).view(np.uint8).data
        self.keep()

    def keep(self) -> None:
        """A round that counts is over."""
        # a copy: other threads read it while the next round is under way
        self._kept = bytes(self._bytes)

    def put_back(self) -> None:
        """Have `told` be as it was kept last; whoever calls has the device know it too."""
        self._bytes[:] = self._kept

    def by_lane(self) -> dict[str, dict[str, int]]:
        """Experts and bytes by lane, in dicts of the caller's own."""
        totals = {name: {"experts": 0, "bytes": 0} for name in (*_NAMES.values(), "helper")}
        kept = np.frombuffer(self._kept, np.uint64).reshape(self.told.shape)
        for nbytes, counts in zip(self.nbytes, kept, strict=True):
            for lane, count in enumerate(counts.tolist()):
                total = totals[_NAMES.get(lane, "helper")]
                total["experts"] += count
                total["bytes"] += count * nbytes
        return totals
