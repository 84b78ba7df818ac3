"""Filling slots: each expert from its source, straight from page-locked memory where it lies there.

Otherwise the source reads it into one of two buffers while the other one is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from strata_core.cache.runs import runs
from strata_core.cache.slots import SlotPool
from strata_core.cache.staging import Staging
from strata_core.checkpoint.scales import check_scales
from strata_core.interfaces import BlobLayout, Expert, Progress, Source, StableSource, View


def fill_slots(
    pool: SlotPool,
    layouts: Mapping[int, BlobLayout],
    source: Source,
    staging: Staging,
    progress: Progress,
    label: str,
) -> None:
    """Read every expert of a pool into its slot. Raises StrataError, naming the expert.

    `label` is what progress calls the work.
    """
    progress.start(label, sum(layouts[e.layer].nbytes for e in pool.places))
    try:
        for expert, slot in pool.places.items():
            _fill(pool.device, slot, layouts[expert.layer], expert, source, staging)
            progress.advance(layouts[expert.layer].nbytes)
        staging.drain()
    finally:
        staging.drain()
        progress.done()


def _fill(
    device: int, slot: int, layout: BlobLayout, expert: Expert, source: Source, staging: Staging
) -> None:
    view = source.view(expert)
    try:
        if view.dma:
            _copy_parts(device, slot, layout, view, staging)
            if not isinstance(source, StableSource):
                staging.drain()
            return
    finally:
        source.release(expert)

    def read(buffer: NDArray[np.uint8]) -> int:
        pad = source.read_into(expert, buffer.data)
        for part in layout.parts:
            start = pad + part.offset
            check_scales(part.type, buffer[start : start + part.nbytes], str(expert))
        return pad

    staging.read(device, slot, layout.nbytes, read)


def _copy_parts(device: int, slot: int, layout: BlobLayout, view: View, staging: Staging) -> None:
    """Copies that a copy engine makes by itself; `staging.drain` waits for them."""
    for offset, address, nbytes in runs(layout, view.parts):
        staging.direct(device, slot + offset, address, nbytes)
