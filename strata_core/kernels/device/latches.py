"""What rounds latch, in cells of the host's memory: how they failed, who was late, what went bad.

They are looked at once a round, so not as arrays: to read one number of an array takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.kernels.cpu.hand_over import NO_FAILURE
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.exchange import LINE, MOST_HELPERS, Exchange
from strata_core.kernels.device.layout import LATE, STATUS_BYTES

_FIRST: Callable[[memoryview], int] = itemgetter(0)


@frozen(eq=False)
class Latches:
    """The cells of one bound model, for the thread that runs its rounds.

    `failure` is that of `hand_over`, `late` the layer whose answer came too late, by its place
    among the routed ones; `ops` the lowest op that met a value that is not finite, where it was
    computed; `helpers` are those of them that helpers write.
    """

    failure: memoryview
    late: memoryview
    ops: tuple[memoryview, ...]
    helpers: tuple[memoryview, ...]

    @classmethod
    def of(
        cls,
        exchange: Exchange,
        helpers: Iterable[int],
        host: NDArray[np.uint32],
        failure: NDArray[np.int64],
    ) -> Latches:
        """Those of an exchange, for helpers by number, of the CPU's lane, and of the schedule."""
        device = exchange.array("result", np.uint32, STATUS_BYTES // 4)
        lines = exchange.array("helper status", np.uint32, MOST_HELPERS, LINE // 4)
        others = tuple(lines[number - 1].data for number in helpers)
        ops = (device.data, host.data, *others)
        return cls(failure.data, device[LATE // 4 :].data, ops, others)

    def clear(self) -> None:
        """A round begins; the device and the CPU's lane clear what they write themselves."""
        self.failure[0] = NO_FAILURE
        for cell in self.helpers:
            cell[0] = NOTHING_LATCHED

    def lowest(self) -> int:
        """The lowest op that met a value that is not finite, on any device or the CPU."""
        return min(map(_FIRST, self.ops))
