"""How often each expert was chosen: rounds are noted one by one, and added up a few at a time.

A round reads so many weights that the processor's caches hold nothing else behind it; to touch a
count of every expert would then take longer than all else that is noted of a round.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

TOGETHER = 16
"""Rounds that are added up together."""

Numbers = NDArray[np.int64]


@define(eq=False)
class Picks:
    """Counts of experts by number: layer by layer, `experts` in each. One thread notes, any asks.

    `picked`: int32 [layers, entries], where rounds write an expert's index for each entry.
    """

    picked: NDArray[np.int32]
    experts: int
    _firsts: Numbers = field(init=False)
    _known: tuple[Numbers, tuple[Numbers, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        layers = len(self.picked)
        self._firsts = np.arange(layers, dtype=np.int64)[:, None] * self.experts
        self._known = np.zeros(layers * self.experts, np.int64), ()

    def note(self, entries: int) -> Numbers:
        """A round of so many entries is over: its picks by layer, which stay as they are."""
        picked = self.picked[:, :entries].astype(np.int64)
        totals, noted = self._known
        self._known = totals, (*noted, picked)
        if len(noted) + 1 >= TOGETHER:
            self._known = self.totals(), ()
        return picked

    def numbers(self, picked: Numbers) -> Numbers:
        """The numbers of the experts of picks by layer, in an array of the caller's own."""
        return (picked + self._firsts).reshape(-1)

    def add(self, counts: Numbers) -> None:
        """A prompt asked for each expert so often."""
        self._known = self.totals() + counts, ()

    def totals(self) -> Numbers:
        """How often each was chosen so far; nobody else changes the array."""
        totals, noted = self._known  # together: another thread may be noting
        if not noted:
            return totals.copy()
        asked = self.numbers(np.concatenate(noted, axis=1))
        return totals + np.bincount(asked, minlength=len(totals))
