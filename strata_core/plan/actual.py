"""A plan beside what was really taken, and a predicted rate beside the measured one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from strata_core.plan.plan import Plan
from strata_core.plan.sizes import Tier, gib


@frozen(kw_only=True)
class Actual:
    """What a started model holds: bytes by tier (`Tier.name`), and how host memory was had.

    `items` has the parts of a tier by name (`Item.name`); a tier or part that is missing was not
    counted. `host` bytes are in regions of host memory for experts, `pinned` of them page-locked;
    `paths` has the same for each region, in words.
    """

    taken: Mapping[str, int] = field(factory=dict)
    items: Mapping[str, Mapping[str, int]] = field(factory=dict)
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


@frozen(kw_only=True)
class MemoryBeside:
    """A kind of memory, `whole` and by its items; `device` is the label of whose it is."""

    kind: str
    device: str
    whole: Beside
    items: tuple[Beside, ...]

    def as_json(self) -> dict[str, Any]:
        """As an entry of a document; bytes."""
        return {
            "kind": self.kind,
            "device": self.device or None,
            "planned": int(self.whole.planned),
            "actual": self.whole.actual,
            "drift": self.whole.drift,
            "items": [
                {"name": item.what, "planned": int(item.planned), "actual": item.actual}
                for item in self.items
            ],
        }


def memory_beside(plan: Plan, actual: Actual) -> tuple[MemoryBeside, ...]:
    """Each kind of memory that was planned; the file is no memory."""
    return tuple(
        MemoryBeside(
            kind=tier.name,
            device=tier.label,
            whole=Beside(tier.name, tier.need, actual.taken.get(tier.name)),
            items=_items(tier, actual.items.get(tier.name, {})),
        )
        for tier in plan.tiers
        if tier.name != "file"
    )


def _items(tier: Tier, taken: Mapping[str, int]) -> tuple[Beside, ...]:
    """What was planned, and after it what was taken without having been planned."""
    planned: dict[str, int] = {}
    for item in tier.items:
        planned[item.name] = planned.get(item.name, 0) + item.nbytes
    names = [*planned, *(name for name in taken if name not in planned)]
    return tuple(Beside(name, planned.get(name, 0), taken.get(name)) for name in names)


def memory_line(rows: tuple[MemoryBeside, ...], paths: tuple[str, ...]) -> str:
    """The line for the log: planned and taken of each kind of memory, and the paths."""
    parts = []
    for row in rows:
        whole = row.whole
        came = "not counted"
        if whole.actual is not None:
            came = f"{gib(int(whole.actual))} taken{_part(whole)}"
        parts.append(f"{row.kind} {gib(int(whole.planned))} planned, {came}")
    return "; ".join((*parts, *paths))


def speed_line(row: Beside) -> str:
    """The line for the log about a rate."""
    if row.actual is None:
        return f"{row.what}: {row.planned:.1f} tokens/s predicted, none measured"
    return (
        f"{row.what}: {row.planned:.1f} tokens/s predicted, {row.actual:.1f} measured at best"
        f"{_part(row)}"
    )


def disk_line(row: Beside) -> str:
    """The line for the log about a disk."""
    came = "nothing read" if row.actual is None else f"{row.actual / 1e9:.2f} measured{_part(row)}"
    return f"{row.what}: {row.planned / 1e9:.2f} GB/s expected, {came}"


def _part(row: Beside) -> str:
    return "" if row.drift is None else f" ({row.drift:+.0%})"
