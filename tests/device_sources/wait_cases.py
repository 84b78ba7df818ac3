"""Ways in which a kernel meets the host's word: none, answered, not answered, late already."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from kernel_bench import Buffer, Ref, same

LAYER, ROUND = 5, (1 << 63) - 2
"""The kernel's layer, and the number of its round: one that does not fit into 32 bits."""

BOUND = 40_000
"""Ticks; of nanoseconds on a device, of looks where a test counts those."""


@frozen
class Waiting:
    """`answer`: the word (None: there is nothing to wait for); `late`: the latch before."""

    label: str
    answer: int | None
    late: int = 0xFFFFFFFF

    def parts(self):
        """Buffers, arguments, and what is to be looked at: words are read, the latch may change."""
        words = {"late": Buffer(np.array([self.late], np.uint32))}
        words["round"] = Buffer(np.array([ROUND], np.int64))
        given = {"late": Ref("late"), "round": Ref("round"), "bound": BOUND, "layer": LAYER}
        given["answer"] = 0
        if self.answer is not None:
            words["answer"] = Buffer(np.array([self.answer], np.int64), host=True)
            given["answer"] = Ref("answer")
        return words, given, {"late": same}


WAITS = (
    Waiting("", None),
    Waiting(", answered", ROUND),
    Waiting(", answer of the round before", ROUND - 1),
    Waiting(", low half alone is right", ROUND & 0xFFFFFFFF),
    Waiting(", late before", 0, late=2),
)
