"""A swap under way, what rounds find experts by, and what was done so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from attrs import define, frozen

from strata_core.abilities import Move
from strata_core.cache.adaptive import Pair
from strata_core.cache.waves import Wave
from strata_core.interfaces import Expert


class Table(Protocol):
    """What rounds find experts by. Called between rounds, on their thread."""

    def publish(self, swaps: Sequence[tuple[Pair, int]]) -> None:
        """From the next round on, each entering expert is in the slot at that address.

        Its partner is in none. Raises StrataError; then nothing has changed.
        """

    def refresh(self, experts: Iterable[Expert]) -> None:
        """The source's addresses of these experts have changed."""


class Policy(Protocol):
    """Who decides which experts change places; is told, between rounds, what becomes of them."""

    def bar(self, expert: Expert, *, barred: bool = True) -> None:
        """Have an expert stay where it is, or no longer."""

    def moved(self, pair: Pair) -> None:
        """A swap was done."""


@frozen(kw_only=True)
class Counts:
    """Experts that entered and that left with a copy, their bytes, and swaps that were undone."""

    entered: int = 0
    entered_bytes: int = 0
    left: int = 0
    left_bytes: int = 0
    undone: int = 0

    def plus(
        self,
        *,
        entered: int = 0,
        entered_bytes: int = 0,
        left: int = 0,
        left_bytes: int = 0,
        undone: int = 0,
    ) -> Counts:
        """With so many more."""
        return Counts(
            entered=self.entered + entered,
            entered_bytes=self.entered_bytes + entered_bytes,
            left=self.left + left,
            left_bytes=self.left_bytes + left_bytes,
            undone=self.undone + undone,
        )


@define(eq=False)
class Swap:
    """One swap under way. What of it is not None has still to be ended.

    `about`: the one of the pair that an error of the latest step is of. `shown`: the source has its
    copy of the leaving expert, which is still in its slot.
    """

    pair: Pair
    slot: int
    about: Expert
    promote: Move | None = None
    demote: Move | None = None
    into: int | None = None
    out: int | None = None
    reading: Future[int] | None = None
    wave: Wave | None = None
    storing: Future[None] | None = None
    shown: bool = False
    error: Exception | None = None
