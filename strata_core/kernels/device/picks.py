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
    """Counts of `experts` experts, by number. One thread notes, any thread asks."""

    experts: int
    _known: tuple[Numbers, tuple[Numbers, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._known = np.zeros(self.experts, np.int64), ()

    def note(self, asked: Numbers) -> None:
        """A round asked for the experts of these numbers; the array is kept."""
        totals, noted = self._known
        self._known = totals, (*noted, asked)
        if len(noted) + 1 >= TOGETHER:
            self._known = self.totals(), ()

    def add(self, counts: Numbers) -> None:
        """A prompt asked for each expert so often."""
        self._known = self.totals() + counts, ()

    def totals(self) -> Numbers:
        """How often each was chosen so far; nobody else changes the array."""
        totals, noted = self._known  # together: another thread may be noting
        if not noted:
            return totals.copy()
        return totals + np.bincount(np.concatenate(noted), minlength=self.experts)
