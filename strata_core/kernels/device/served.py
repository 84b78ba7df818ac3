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

    `told`: uint64 [layers, LANES], which the device writes; `nbytes` are those of an expert of each
    layer.
    """

    told: NDArray[np.uint64]
    nbytes: Sequence[int]
    _kept: NDArray[np.uint64] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        """A round that counts is over."""
        # a copy: other threads read it while the next round is under way
        self._kept = self.told.copy()

    def put_back(self) -> None:
        """Have `told` be as it was kept last; whoever calls has the device know it too."""
        self.told[:] = self._kept

    def by_lane(self) -> dict[str, dict[str, int]]:
        """Experts and bytes by lane, in dicts of the caller's own."""
        totals = {name: {"experts": 0, "bytes": 0} for name in (*_NAMES.values(), "helper")}
        for nbytes, counts in zip(self.nbytes, self._kept, strict=True):
            for lane, count in enumerate(counts.tolist()):
                total = totals[_NAMES.get(lane, "helper")]
                total["experts"] += count
                total["bytes"] += count * nbytes
        return totals
