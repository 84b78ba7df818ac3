"""Correcting the split by what rounds report: how long the CPU's part of a layer really takes.

Start-up measures in a tenth of a second, and what else the machine does may change. The table
changes between rounds only, and seldom: it must not flutter.
"""

from __future__ import annotations

import logging

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from strata_core.kernels.device.split import Lane, Split, by_lanes

_log = logging.getLogger("strata.device")

PERIOD = 32
"""Rounds of one token that a correction is about; those of the first are not looked at."""

EVERY = 4
"""One of so many rounds is kept, to be looked at with the others when a period is over."""

LEAST = 32
"""Layers with work for the CPU that a look needs."""

TOLERANCE = 0.1
"""Part by which times may differ from what the lane was said to do."""


@define(eq=False)
class Correction:
    """Watches rounds of one token; used by the engine's thread.

    `times`: int64 [layers, 2], ticks of the host's clock when the CPU's part of a layer began and
    ended, `ticks` of them in a second; `counts`: int64 [layers, 2], first what fell to the CPU in
    it. Rounds write both. Experts have `nbytes`, a token picks `top_k`.
    """

    times: NDArray[np.int64]
    counts: NDArray[np.int64]
    ticks: float
    nbytes: float
    top_k: int
    _rounds: int = field(default=0, init=False)
    _seen: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(factory=list, init=False)
    _ratios: list[NDArray[np.float64]] = field(factory=list, init=False)

    def after(self, split: Split) -> Split | None:
        """A round of one token is over that `split` held for; the one that is better from now on.

        None: it stays.
        """
        self._rounds += 1
        if self._rounds % EVERY:
            return None
        if self._rounds > PERIOD:
            self._seen.append((self.counts.copy(), self.times.copy()))
        if self._rounds % PERIOD:
            return None
        self._watch(split)
        if sum(map(len, self._ratios)) < LEAST:
            return None
        ratio = float(np.median(np.concatenate(self._ratios)))
        self._ratios.clear()
        return self._corrected(split, ratio) if abs(ratio - 1) >= TOLERANCE else None

    def _watch(self, split: Split) -> None:
        """Note, of each layer with work, how many times what was expected it took.

        Of all rounds that were kept at once: a round has no time for so many small steps. The
        median is what counts: the machine's other programs make single layers long.
        """
        seen, self._seen = self._seen, []
        if not seen or split.cpu is None:
            return
        counts = np.concatenate([of_round for of_round, _ in seen])[:, 0]
        times = np.concatenate([of_round for _, of_round in seen])
        busy = np.flatnonzero(counts)
        if not len(busy):
            return
        taken = (times[busy, 1] - times[busy, 0]) / self.ticks
        self._ratios.append(
            taken / (split.cpu.start + counts[busy] * (self.nbytes / split.cpu.rate))
        )

    def _corrected(self, split: Split, ratio: float) -> Split | None:
        """The split with a CPU that takes `ratio` of the time that it was said to take."""
        # rounds were made without the CPU in layers where the link can take every miss
        if split.cpu is None or split.link is None or split.takes_all(self.top_k):
            return None
        cpu = Lane(split.cpu.start * ratio, split.cpu.rate / ratio)
        table = by_lanes(len(split.table) - 1, int(self.nbytes), split.link, cpu)
        made = evolve(split, table=table, cpu=cpu, corrections=split.corrections + 1)
        if made.takes_all(self.top_k):
            table[self.top_k] -= 1  # else nothing would fall to the CPU: nobody would see it change
        _log.info(
            "in rounds the CPU computes %.1f GB/s: of 1 to %d misses of a layer %s go over the "
            "link from now on",
            cpu.rate / 1e9,
            self.top_k,
            ", ".join(map(str, table[1 : self.top_k + 1].tolist())),
        )
        return made
