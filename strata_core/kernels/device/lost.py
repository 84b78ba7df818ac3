"""Experts that a prompt could not bring: which lost their slots, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from strata_core.cache.swap_reports import said
from strata_core.errors import Degradation
from strata_core.interfaces import Expert


@define(eq=False)
class Lost:
    """Experts whose slots on a device, `place`, nobody is in, until rounds know. One thread's.

    `vacated` are the addresses of all slots that were lost so far: prompts go on using them.
    """

    place: str
    degrade: Callable[[Degradation], None]
    experts: list[Expert] = field(factory=list, init=False)
    vacated: list[int] = field(factory=list, init=False)
    _told: set[str] = field(factory=set, init=False)

    def add(self, expert: Expert, slot: int, error: Exception) -> None:
        """The source had an error when an expert was to come back to its slot."""
        self.experts.append(expert)
        self.vacated.append(slot)
        told = Degradation(
            what=f"{expert} did not come back to the cache of {self.place} after a prompt",
            why=said(error),
            cost="it is computed from the host; while it cannot be read, what asks for it fails",
            remedy="check the disk and the model's files with `strata verify`, then start again",
        )
        self._tell("lost", told)

    def unread(self, expert: Expert, error: Exception) -> None:
        """The source had an error with an expert that no token of a prompt asked for."""
        told = Degradation(
            what=f"{expert} could not be brought for a prompt on {self.place}",
            why=said(error),
            cost="nothing now, since no token asked for it; what asks for it fails",
            remedy="check the disk and the model's files with `strata verify`",
        )
        self._tell("unread", told)

    def _tell(self, kind: str, item: Degradation) -> None:
        """Report the first failure of a kind; the others are alike."""
        if kind not in self._told:
            self._told.add(kind)
            self.degrade(item)
