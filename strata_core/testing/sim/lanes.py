"""Who computes which entry: the rule of the kernels `assign` and `dispatch`, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.kernels.device.layout import HELPER, HIT, HOST, LINK


def choose_lanes(
    picks: Sequence[int], cells: NDArray[Any], share: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The lane of each entry: the rule that the table states for `assign`."""
    lane_of: dict[int, int] = {}
    misses = []
    for pick in dict.fromkeys(picks):
        cell = cells[pick]
        if cell["slot"][0]:
            lane_of[pick] = HIT
        elif cell["helper"]:
            lane_of[pick] = HELPER + int(cell["helper"]) - 1
        else:
            misses.append(pick)
    over_link = 0
    for pick in misses:
        takes = bool(cells[pick]["alias"][0]) and over_link < share[len(misses)]
        lane_of[pick] = LINK if takes else HOST
        over_link += takes
    return np.array([lane_of[pick] for pick in picks], np.int32)


def fill_entries(
    entries: NDArray[Any],
    picks: NDArray[np.int32],
    cells: NDArray[Any],
    outputs: int,
    bases: tuple[int, int],
) -> None:
    """Addresses, rows and first entries, by the lanes that stand in `entries`.

    `bases`: rows of what this device computes, and of what others do.
    """
    lanes = entries["lane"]
    slots, aliases = cells["slot"][picks], cells["alias"][picks]
    there = np.where((lanes == HIT)[:, None], slots, aliases)
    here = (lanes == HIT) | (lanes == LINK)
    for part, name in enumerate(("gate", "up", "down")):
        entries[name] = np.where(here, there[:, part], 0)
    base = np.where(here, *(np.uint64(b) for b in bases))
    entries["row"] = base + np.arange(len(picks), dtype=np.uint64) * np.uint64(4 * outputs)
    entries["expert"] = picks
    values, firsts, inverse = np.unique(picks, return_index=True, return_inverse=True)
    del values
    entries["first"] = firsts[inverse]
