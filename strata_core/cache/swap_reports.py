"""What is told of swaps that fail: the first failure of a kind, since the others are alike."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from strata_core.errors import Degradation, StrataError
from strata_core.installed import describe
from strata_core.interfaces import Expert


@define(eq=False)
class Reports:
    """Tells of swaps on one device, `place`. Used by one thread."""

    place: str
    degrade: Callable[[Degradation], None]
    _told: set[str] = field(factory=set, init=False)

    def stopped(self, error: Exception) -> None:
        """No more swaps begin."""
        told = Degradation(
            what=f"experts no longer change places on {self.place}",
            why=said(error),
            cost="the cache keeps the experts that it has, whatever the text asks for",
            remedy="start again; if it happens again, give --adapt-every 0",
        )
        self._tell("stopped", told)

    def undone(self, expert: Expert, error: Exception) -> None:
        """An expert could not enter."""
        told = Degradation(
            what=f"{expert} did not enter the cache of {self.place}",
            why=said(error),
            cost="it is computed from where it is; others go on changing places",
            remedy="check the model's files with `strata verify`",
        )
        self._tell("undone", told)

    def kept(self, expert: Expert, error: Exception) -> None:
        """An expert could not leave: its copy was not made, or found wrong."""
        told = Degradation(
            what=f"{expert} did not leave the cache of {self.place}",
            why=said(error),
            cost="it keeps its slot, whatever the text asks for; others go on changing places",
            remedy="test the memory of the device and of the machine; `strata verify`",
        )
        self._tell("kept", told)

    def unended(self, expert: Expert, error: Exception) -> None:
        """The source raised where it was only told how a move had ended."""
        told = Degradation(
            what=f"the source did not end a move of {expert}",
            why=said(error),
            cost="the room in memory that it has for this expert may stay taken",
            remedy="report it to the authors of the source's plugin, or choose another --source",
        )
        self._tell("unended", told)

    def _tell(self, kind: str, item: Degradation) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self.degrade(item)


def said(error: Exception) -> str:
    """What an error says, on one line; one that nobody foresaw with its kind."""
    if isinstance(error, StrataError):
        return f"{error.what}; {error.why}" if error.why else error.what
    return describe(error)
