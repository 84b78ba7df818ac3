"""The part of a plan that is about the tiered file: when it is used, what it keeps, what it reads.

Pure arithmetic; counts of experts are planned with the mean size of a cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from strata_core.errors import Degradation
from strata_core.plan.sizes import RING, Item, Sizes, gib

if TYPE_CHECKING:
    from strata_core.plan.plan import Plan, PlanRequest

SOURCE = "tiered-file"
"""The name of its record."""

BESIDE = 16 << 30
"""It is used by itself where a machine's memory is less than all experts and this."""


@frozen(kw_only=True)
class LowRam:
    """Whether the planner may choose the tiered file, and for what reason.

    `because` is "" where it is not to be chosen by itself; `unmet` says why it could not serve, ""
    where it could. `cells` are the bytes of a cell for every expert together, `ring` those of the
    cells that others are read into. `rates` is how often a token asks for each expert, the most
    asked for first; `learned` says that they were counted.
    """

    because: str = ""
    unmet: str = ""
    cells: int = 0
    ring: int = 0
    rates: tuple[float, ...] = ()
    learned: bool = False


@frozen(kw_only=True)
class Reads:
    """What is expected to be read from the file: experts that lie there alone, and a token's part.

    `experts_kept` have a cell in memory. `learned`: by counts of a profile, else as if all experts
    were asked for alike.
    """

    experts_kept: int
    experts_in_file: int
    experts_a_token: float
    bytes_a_token: int
    learned: bool

    def __str__(self) -> str:
        by = "by the profile" if self.learned else "if all experts are asked for alike"
        return (
            f"{self.experts_kept} experts in memory, {self.experts_in_file} in the file alone: "
            f"{self.experts_a_token:.1f} experts ({gib(self.bytes_a_token)}) read a token, {by}"
        )


def rule(experts: int, installed: int) -> str:
    """Why a machine with so much memory is to use the tiered file by itself; "" where it is not."""
    if experts + BESIDE <= installed:
        return ""
    return f"the experts ({gib(experts)}) and {gib(BESIDE)} exceed the {gib(installed)} there are"


def ring(low_ram: LowRam) -> Item:
    """The memory that experts are read into."""
    return Item("experts on their way from the file", low_ram.ring, RING)


def granted(low_ram: LowRam, room: int) -> int:
    """Bytes for experts that stay in memory, of the room that is left."""
    return max(0, min(low_ram.cells, room))


def reads(low_ram: LowRam, sizes: Sizes, budget: int, cached: int) -> Reads:
    """What is read with `budget` bytes of cells, beside `cached` experts on devices."""
    kept = budget * sizes.count // max(1, low_ram.cells)
    outside = low_ram.rates[cached + kept :]
    return Reads(
        experts_kept=kept,
        experts_in_file=max(0, sizes.count - cached - kept),
        experts_a_token=sum(outside),
        bytes_a_token=int(sum(outside) * sizes.experts / max(1, sizes.count)),
        learned=low_ram.learned,
    )


def tier_degradations(request: PlanRequest, plan: Plan) -> Iterator[Degradation]:
    """What the tiered file makes worse, or what is worse for want of it."""
    low_ram = request.low_ram
    if plan.source == SOURCE and plan.reads is not None:
        remedy = "give a --ram-budget, or a smaller model"
        if request.source is None and plan.reads.experts_in_file:
            yield Degradation(
                what=f"{plan.reads.experts_in_file} experts are read from the file when needed",
                why=plan.source_because,
                cost=f"{plan.reads.experts_a_token:.1f} experts are read for a token",
                remedy=remedy if request.reserve else "raise --ram-budget",
            )
        if not low_ram.learned and plan.reads.experts_in_file:
            yield Degradation(
                what="which experts stay in memory is not chosen by use",
                why="there is no profile of this model yet",
                cost="more is read from the file than need be",
                remedy="`strata profile` makes one for --expert-profile; what this run asks for "
                "counts for the next one",
            )
    elif request.source is None and low_ram.because and plan.source == "mmap":
        yield Degradation(
            what="the mapped file is used instead of a tier in memory",
            why=low_ram.unmet or plan.source_because,
            cost="the system's file cache decides which experts stay in memory",
            remedy="use one device with --device, or free memory"
            if low_ram.unmet
            else "raise --ram-budget, or free memory",
        )
