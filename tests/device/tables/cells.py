"""The cells of the three tables, their goals, and the order that costs the fewest loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

SHARES = {"all": 1.0, "half": 0.5, "quarter": 0.25, "none": 0.0}
"""The part of all experts that the first device holds, by name."""

SKEWS = (0.6, 0.3, 0.0)
USUAL_SKEW = 0.6
"""The skew of cells that are measured once."""

DECODE_GOALS = {
    "all": dict.fromkeys(SKEWS, 1.0),
    "half": {0.6: 3.0, 0.3: 2.2, 0.0: 1.5},
    "quarter": {0.6: 2.5, 0.3: 2.0, 0.0: 1.6},
    "none": dict.fromkeys(SKEWS, 1.8),
}
PROMPT_GOALS = {"all": 0.8, "half": 1.3, "quarter": 1.3, "none": 1.3}
BOUND_GOAL = 0.7
"""The part of the bound that is to be reached."""

TABLES = ("decode", "prompts", "paths")


@frozen
class Cell:
    """One cell: the table it is of, the part of the experts on the device, the routers' skew."""

    table: str
    share: str
    skew: float

    @property
    def name(self) -> str:
        """What it is called in the state file."""
        return f"{self.table} {self.share} {self.skew:g}"

    @property
    def goal(self) -> float | None:
        """The ratio to reach; None where there is none."""
        if self.table == "decode":
            return DECODE_GOALS[self.share].get(self.skew)
        return PROMPT_GOALS[self.share] if self.table == "prompts" else None

    def experts(self, total: int) -> int:
        """How many experts the device holds."""
        return round(total * SHARES[self.share])


def cells(tables: Sequence[str], shares: Sequence[str], skews: Sequence[float]) -> list[Cell]:
    """What is asked for: skew by skew, since the file has one at a time; `all` and `none` once.

    All tables of a skew come before the next skew.
    """
    return [
        cell
        for skew in skews
        for table in tables
        for cell in _of(table, shares, skew, first=skew == skews[0])
    ]


def _of(table: str, shares: Sequence[str], skew: float, *, first: bool) -> Iterator[Cell]:
    if table == "paths":
        if first:
            yield Cell(table, "half", skew)
        return
    for share in shares:
        if first or (table == "decode" and share not in ("all", "none")):
            yield Cell(table, share, skew)
