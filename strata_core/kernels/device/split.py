"""How the misses of a layer are split between the link and the CPU: one table, and nothing else.

`table[m]` of m missing experts go over the link, the first in router order that have an alias. The
table changes between rounds only, and no bit depends on it. See docs/decisions/0012.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Table = NDArray[np.int32]


@frozen
class Lane:
    """What a lane was measured to do: seconds before its first byte, bytes a second after that."""

    start: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        """The time of a layer's part; nothing takes no time."""
        return self.start + nbytes / self.rate if nbytes else 0.0


@frozen(eq=False, kw_only=True)
class Split:
    """The table, and where it comes from: the share that was asked for, or the measured lanes.

    `corrections` counts how often rounds have changed it since.
    """

    table: Table
    asked: float | Literal["auto"]
    link: Lane | None = None
    cpu: Lane | None = None
    corrections: int = 0

    def takes_all(self, misses: int) -> bool:
        """Whether all of up to so many misses go over the link, as far as they have an alias."""
        return bool((self.table[: misses + 1] == np.arange(misses + 1)).all())

    def as_json(self, top_k: int) -> dict[str, Any]:
        """For `--json`: `table` is that of a token's misses."""
        lanes = {"link": self.link, "cpu": self.cpu}
        return {
            "pcie_frac": self.asked,
            "table": self.table[: top_k + 1].tolist(),
            "corrections": self.corrections,
            "rates": {
                name: {"gb_s": round(lane.rate / 1e9, 2), "start_us": round(lane.start * 1e6, 1)}
                for name, lane in lanes.items()
                if lane is not None
            },
        }


def by_share(most: int, share: float) -> Table:
    """The table of a fixed share of 0 to 1, for up to `most` misses."""
    table: Table = np.rint(np.arange(most + 1) * share).astype(np.int32)
    return table


def by_lanes(most: int, nbytes: int, link: Lane, cpu: Lane) -> Table:
    """The table by which both lanes end as early as they can; experts have `nbytes`.

    The link takes more where two splits end at the same time.
    """

    def best(misses: int) -> int:
        def end(taken: int) -> float:
            return max(link.seconds(taken * nbytes), cpu.seconds((misses - taken) * nbytes))

        return min(range(misses, -1, -1), key=end)

    return np.array([best(misses) for misses in range(most + 1)], np.int32)
