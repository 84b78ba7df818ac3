"""Which experts are to change places: from how often decode rounds asked for each, with decay.

Pure policy: it moves nothing. Experts are numbered layer by layer, in the order of the layouts.
docs/decisions/0014-swaps.md has the measurements behind the constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.interfaces import BlobLayout, Expert
from strata_core.plan.moving import Pace

HORIZON = 64
"""Rounds that a count lasts, and that a swap has to pay for itself in."""

MARGIN = 2.3
"""By how many uses within the horizon the entering expert must lead: what a swap costs."""

EXCHANGE_MARGIN = 1.15 * MARGIN
"""The same where the leaving expert is copied out at the same time."""


@frozen
class Pair:
    """Two experts of the same layout that are to change places."""

    leaving: Expert
    entering: Expert


@define(eq=False)
class Demand:
    """How often each expert was asked for lately, and the swaps that follow from it.

    A count loses 1/HORIZON of itself every round, so it is about the number of the last HORIZON
    rounds that asked for the expert. `inside` are the experts in slots, `barred` those that are to
    stay where they are. Used by one thread.
    """

    experts: int
    layers: tuple[int, ...]
    counts: NDArray[np.float64]
    inside: NDArray[np.bool_]
    barred: NDArray[np.bool_]
    _kinds: tuple[NDArray[np.bool_], ...]
    _ranks: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        layouts: Mapping[int, BlobLayout],
        experts: int,
        ranking: Sequence[Expert],
        rates: Sequence[float] = (),
    ) -> Demand:
        """No expert is inside or barred; counts are what HORIZON tokens would leave.

        `rates` says how often a token asks for each expert of `ranking` (nothing: for none, yet);
        of equal counts the one that ranks first is preferred.
        """
        layers = tuple(layouts)
        total = len(layers) * experts
        kinds = list(dict.fromkeys(layouts.values()))
        of_layer = np.array([kinds.index(layouts[layer]) for layer in layers], np.int64)
        kind = np.repeat(of_layer, experts)
        made = cls(
            experts,
            layers,
            np.zeros(total),
            np.zeros(total, bool),
            np.zeros(total, bool),
            tuple(kind == n for n in range(len(kinds))),
            np.full(total, total, np.int64),
        )
        order = [made.number(expert) for expert in ranking]
        made._ranks[order] = np.arange(len(order))
        if len(rates):
            made.counts[order] = np.multiply(rates, HORIZON)
        return made

    def number(self, expert: Expert) -> int:
        """An expert's number."""
        return self.layers.index(expert.layer) * self.experts + expert.index

    def expert(self, number: int) -> Expert:
        """The expert of a number."""
        return Expert(self.layers[number // self.experts], number % self.experts)

    def round(self, asked: NDArray[np.int64]) -> None:
        """A decode round asked for the experts with these numbers, each listed once or oftener."""
        self.counts *= 1 - 1 / HORIZON
        # a round reads an expert once, however many of its tokens asked for it: so does this add
        self.counts[asked] += 1

    def bar(self, expert: Expert, *, barred: bool = True) -> None:
        """Have an expert stay where it is, or no longer."""
        self.barred[self.number(expert)] = barred

    def moved(self, pair: Pair) -> None:
        """A swap was done."""
        self.inside[self.number(pair.leaving)] = False
        self.inside[self.number(pair.entering)] = True

    def gone(self, expert: Expert) -> None:
        """An expert's slot was taken from it, and nobody is in it."""
        self.inside[self.number(expert)] = False

    def swaps(self, most: int, margin: float = MARGIN) -> list[Pair]:
        """At most `most` pairs, what gains most first; what is barred is in none.

        Every pair's entering expert leads by more than `margin`, so that equal counts never move
        and what was swapped does not come back until counts have changed by twice the margin.
        """
        may = ~self.barred
        found: list[tuple[float, int, int]] = []
        for kind in self._kinds:
            inside = np.flatnonzero(kind & self.inside & may)
            found += self._pairs(inside, np.flatnonzero(kind & ~self.inside & may), most, margin)
        found.sort(key=lambda pair: (-pair[0], pair[2]))
        return [Pair(self.expert(a), self.expert(b)) for _, a, b in found[: max(0, most)]]

    def _pairs(
        self, inside: NDArray[np.int64], outside: NDArray[np.int64], most: int, margin: float
    ) -> list[tuple[float, int, int]]:
        """(lead, leaving, entering) within one layout: the most asked for with the least."""
        if not len(inside) or not len(outside) or most <= 0:
            return []
        counts, ranks = self.counts, self._ranks
        lowest, highest = counts[inside].min(), counts[outside].max()
        # most experts are in no pair at all, and need not be sorted
        inside = inside[counts[inside] < highest - margin]
        outside = outside[counts[outside] > lowest + margin]
        inside, outside = _smallest(inside, counts, most), _smallest(outside, -counts, most)
        leaving = inside[np.lexsort((-ranks[inside], counts[inside]))]
        entering = outside[np.lexsort((ranks[outside], -counts[outside]))]
        size = min(len(leaving), len(entering))
        leads = counts[entering[:size]] - counts[leaving[:size]]
        good = leads > margin
        rows = zip(leads[good], leaving[:size][good], entering[:size][good], strict=True)
        return [(float(lead), int(a), int(b)) for lead, a, b in rows]


def _smallest(
    numbers: NDArray[np.int64], values: NDArray[np.float64], most: int
) -> NDArray[np.int64]:
    """Those with the `most` smallest values, and all that are equal to the largest of them."""
    if len(numbers) <= most:
        return numbers
    bound = np.partition(values[numbers], most - 1)[most - 1]
    found: NDArray[np.int64] = numbers[values[numbers] <= bound]
    return found


@define(eq=False)
class Timetable:
    """When swaps are planned and begun. Used by one thread."""

    pace: Pace
    demand: Demand
    margin: float = MARGIN
    _rounds: int = field(default=0, init=False)
    _waiting: list[Pair] = field(factory=list, init=False)

    def due(self) -> list[Pair]:
        """A decode round is over: the pairs that are to begin now.

        Every `every` rounds they are planned anew. What cannot begin is given to `put_back`.
        """
        if self._rounds % self.pace.every == 0:
            self._waiting = self.demand.swaps(self.pace.swaps, self.margin)
        self._rounds += 1
        size = self.pace.at_once
        now, self._waiting = self._waiting[:size], self._waiting[size:]
        return now

    def put_back(self, pairs: Sequence[Pair]) -> None:
        """Pairs for which there was no room; they come first after the next round."""
        self._waiting = [*pairs, *self._waiting]

    def gone(self, expert: Expert) -> None:
        """An expert is in no slot any more: no pair that waits has it leave one."""
        self.demand.gone(expert)
        self._waiting = [pair for pair in self._waiting if pair.leaving != expert]
