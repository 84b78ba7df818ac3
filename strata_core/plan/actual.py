"""A plan beside what was really taken, and a predicted rate beside the measured one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from strata_core.plan.plan import Plan
from strata_core.plan.sizes import gib


@frozen(kw_only=True)
class Actual:
    """What a started model holds: bytes by tier (`Tier.name`), and how host memory was had.

    A tier that is not in `taken` was not counted. `host` bytes are in regions of host memory for
    experts, `pinned` of them page-locked; `paths` has the same for each region, in words.
    """

    taken: Mapping[str, int] = field(factory=dict)
    host: int = 0
    pinned: int = 0
    paths: tuple[str, ...] = ()


@frozen
class Beside:
    """One figure that was planned, and what it came to (None: not known)."""

    what: str
    planned: float
    actual: float | None

    @property
    def drift(self) -> float | None:
        """By what part of the planned figure the actual one is larger; None: cannot be told."""
        if self.actual is None or self.planned <= 0:
            return None
        return self.actual / self.planned - 1

    def as_json(self) -> dict[str, Any]:
        """As an entry of a document."""
        return {
            "what": self.what,
            "planned": self.planned,
            "actual": self.actual,
            "drift": self.drift,
        }


def memory_beside(plan: Plan, actual: Actual) -> tuple[Beside, ...]:
    """Each kind of memory that was planned; the file is no memory."""
    return tuple(
        Beside(tier.name, tier.need, actual.taken.get(tier.name))
        for tier in plan.tiers
        if tier.name != "file"
    )


def memory_line(rows: tuple[Beside, ...], paths: tuple[str, ...]) -> str:
    """The line for the log: planned and taken of each kind of memory, and the paths."""
    parts = [
        f"{row.what} {gib(int(row.planned))} planned, "
        + ("not counted" if row.actual is None else f"{gib(int(row.actual))} taken{_part(row)}")
        for row in rows
    ]
    return "; ".join((*parts, *paths))


def speed_line(row: Beside) -> str:
    """The line for the log about a rate."""
    if row.actual is None:
        return f"{row.what}: {row.planned:.1f} tokens/s predicted, none measured"
    return (
        f"{row.what}: {row.planned:.1f} tokens/s predicted, {row.actual:.1f} measured{_part(row)}"
    )


def _part(row: Beside) -> str:
    return "" if row.drift is None else f" ({row.drift:+.0%})"
