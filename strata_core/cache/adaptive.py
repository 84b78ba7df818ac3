"""Which experts are to change places: from how often decode rounds asked for each, with decay.

Pure policy: it moves nothing. Experts are numbered layer by layer, in the order of the layouts.
docs/decisions/0014-swaps.md has the measurements behind the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.cache.beside import Job, Jobs
from strata_core.interfaces import BlobLayout, Expert
from strata_core.plan.moving import Pace

HORIZON = 64
"""Rounds that a count lasts, and that a swap has to pay for itself in."""

MARGIN = 2.3
"""By how many uses within the horizon the entering expert must lead: what a swap costs."""

EXCHANGE_MARGIN = 1.15 * MARGIN
"""The same where the leaving expert is copied out at the same time."""


GROWTH = HORIZON / (HORIZON - 1)
"""What a use weighs more than one of the round before."""

HEAVY = 2.0**512
"""Sums are made smaller by this power of two, which changes no digit of them, when a use weighs so
much: once in 22,000 rounds, far from the ends of what a float64 holds."""


@frozen
class Pair:
    """Two experts of the same layout that are to change places."""

    leaving: Expert
    entering: Expert


Numbers = NDArray[np.int64]
Leads = list[tuple[float, int, int]]
"""(lead, leaving, entering), experts by number."""


@define(eq=False)
class Demand:
    """How often each expert was asked for lately, and the swaps that follow from it.

    A count loses 1/HORIZON of itself every round, so it is about the number of the last HORIZON
    rounds that asked for the expert. What is kept are `sums`, in which a use weighs more from round
    to round and no other expert's is touched: a count is its sum over `weight`, which begins at 1.
    `inside` are the experts in slots, `barred` those that are to stay where they are. Used by one
    thread at a time.
    """

    experts: int
    layers: tuple[int, ...]
    sums: NDArray[np.float64]
    inside: NDArray[np.bool_]
    barred: NDArray[np.bool_]
    _kinds: tuple[Numbers, ...]
    _ranks: Numbers
    _everyone: tuple[Expert, ...]
    _first: dict[int, int]
    weight: float = field(default=1.0, init=False)
    _sides: list[tuple[Numbers, Numbers]] | None = field(default=None, init=False)

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
            tuple(np.flatnonzero(kind == n) for n in range(len(kinds))),
            np.full(total, total, np.int64),
            tuple(Expert(layer, index) for layer in layers for index in range(experts)),
            {layer: number * experts for number, layer in enumerate(layers)},
        )
        order = [made.number(expert) for expert in ranking]
        made._ranks[order] = np.arange(len(order))
        if len(rates):
            made.sums[order] = np.multiply(rates, HORIZON)
        return made

    @property
    def counts(self) -> NDArray[np.float64]:
        """Every expert's count, by number; an array of the caller's own."""
        return self.sums / self.weight

    def number(self, expert: Expert) -> int:
        """An expert's number."""
        return self._first[expert.layer] + expert.index

    def expert(self, number: int) -> Expert:
        """The expert of a number."""
        return self._everyone[number]

    def round(self, asked: Numbers) -> None:
        """A decode round asked for the experts with these numbers, each listed once or oftener."""
        self.weight *= GROWTH
        if self.weight >= HEAVY:
            self.sums /= HEAVY
            self.weight /= HEAVY
        # a round reads an expert once, however many of its tokens asked for it: so does this add
        self.sums[asked] += self.weight

    def bar(self, expert: Expert, *, barred: bool = True) -> None:
        """Have an expert stay where it is, or no longer."""
        self.barred[self.number(expert)] = barred
        self._sides = None

    def moved(self, pair: Pair) -> None:
        """A swap was done."""
        self.inside[self.number(pair.leaving)] = False
        self.inside[self.number(pair.entering)] = True
        self._sides = None

    def put_inside(self, experts: Iterable[Expert]) -> None:
        """These experts are in slots."""
        self.inside[[self.number(expert) for expert in experts]] = True
        self._sides = None

    def gone(self, expert: Expert) -> None:
        """An expert's slot was taken from it, and nobody is in it."""
        self.inside[self.number(expert)] = False
        self._sides = None

    def swaps(self, most: int, margin: float = MARGIN) -> list[Pair]:
        """At most `most` pairs, what gains most first; what is barred is in none.

        Every pair's entering expert leads by more than `margin`, so that equal counts never move
        and what was swapped does not come back until counts have changed by twice the margin.
        """
        if most <= 0:
            return []
        if self._sides is None:
            self._sides = [self._split(kind) for kind in self._kinds]
        found: Leads = []
        for inside, outside in self._sides:
            found += self._pairs(inside, outside, most, margin * self.weight)
        found.sort(key=lambda pair: (-pair[0], pair[2]))
        everyone = self._everyone
        return [Pair(everyone[a], everyone[b]) for _, a, b in found[:most]]

    def _split(self, kind: Numbers) -> tuple[Numbers, Numbers]:
        """Those of a layout that may leave, and those that may enter."""
        kind = kind[~self.barred[kind]]
        inside = self.inside[kind]
        return kind[inside], kind[~inside]

    def _pairs(self, inside: Numbers, outside: Numbers, most: int, margin: float) -> Leads:
        """Pairs within one layout, in sums: the most asked for with the least."""
        if not len(inside) or not len(outside):
            return []
        ranks, low, high = self._ranks, self.sums[inside], self.sums[outside]
        # most experts are in no pair at all, and need not be sorted
        below, above = low < high.max() - margin, high > low.min() + margin
        inside, low = _smallest(inside[below], low[below], most)
        outside, high = _smallest(outside[above], -high[above], most)
        leaving = np.lexsort((-ranks[inside], low))
        entering = np.lexsort((ranks[outside], high))
        size = min(len(leaving), len(entering), most)
        leaving, entering = leaving[:size], entering[:size]
        leads = -high[entering] - low[leaving]
        size = int(np.count_nonzero(leads > margin))  # they only fall
        rows = (leads, inside[leaving], outside[entering])
        return list(zip(*(row[:size].tolist() for row in rows), strict=True))


def _smallest(
    numbers: Numbers, values: NDArray[np.float64], most: int
) -> tuple[Numbers, NDArray[np.float64]]:
    """Those with the `most` smallest values, and all that are equal to the largest of them."""
    if len(numbers) <= most:
        return numbers, values
    among = values <= np.partition(values, most - 1)[most - 1]
    return numbers[among], values[among]


@define(eq=False)
class Timetable:
    """When swaps are planned and begun.

    Counting and planning are a job beside the next round: `begin` hands over what happened, and
    pairs are there when it is done, which nobody waits for. Used by one thread; `demand` is the
    jobs' own from the first one on, and is told everything by way of this.
    """

    pace: Pace
    demand: Demand
    jobs: Jobs
    margin: float = MARGIN
    _rounds: int = field(init=False)
    _asked: list[Numbers] = field(factory=list, init=False)
    _news: list[Callable[[Demand], None]] = field(factory=list, init=False)
    _concerned: set[Expert] = field(factory=set, init=False)
    _planning: Job[list[Pair]] | None = field(default=None, init=False)
    _waiting: list[Pair] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._rounds = self.pace.every - 1  # the first round's is planned at once

    def round(self, asked: Numbers) -> None:
        """A decode round is over that asked for these experts; the array is kept."""
        self._asked.append(asked)
        self._rounds += 1

    def begin(self) -> None:
        """A round begins: every `every` rounds, have swaps be planned anew beside it.

        Where the last plan is not there yet, this one comes later.
        """
        if self._planning is not None or self._rounds < self.pace.every:
            return
        self._rounds = 0
        asked, self._asked = self._asked, []
        news, self._news = self._news, []
        self._concerned.clear()
        self._planning = self.jobs.begin(partial(self._plan, asked, news))

    def _plan(self, asked: list[Numbers], news: list[Callable[[Demand], None]]) -> list[Pair]:
        """In a job: what has happened, and the pairs that follow from it."""
        for tell in news:
            tell(self.demand)
        for numbers in asked:
            self.demand.round(numbers)
        return self.demand.swaps(self.pace.swaps, self.margin)

    def due(self) -> list[Pair]:
        """A decode round is over: the pairs that are to begin now.

        What cannot begin is given to `put_back`. Raises what a job raised, once.
        """
        if self._planning is not None and self._planning.done:
            planning, self._planning = self._planning, None
            self._waiting = [pair for pair in planning.result() if not self._is_old(pair)]
        size = self.pace.at_once
        now, self._waiting = self._waiting[:size], self._waiting[size:]
        return now

    def _is_old(self, pair: Pair) -> bool:
        """Whether something has happened to one of them that whoever planned it did not know."""
        return pair.leaving in self._concerned or pair.entering in self._concerned

    def put_back(self, pairs: Sequence[Pair]) -> None:
        """Pairs for which there was no room; they come first after the next round."""
        self._waiting = [*pairs, *self._waiting]

    def bar(self, expert: Expert, *, barred: bool = True) -> None:
        """Have an expert stay where it is, or no longer."""
        self._tell(lambda demand: demand.bar(expert, barred=barred), expert)

    def moved(self, pair: Pair) -> None:
        """A swap was done."""
        self._tell(lambda demand: demand.moved(pair), pair.leaving, pair.entering)

    def gone(self, expert: Expert) -> None:
        """An expert is in no slot any more: no pair that waits has it leave one."""
        self._tell(lambda demand: demand.gone(expert), expert)
        self._waiting = [pair for pair in self._waiting if pair.leaving != expert]

    def _tell(self, news: Callable[[Demand], None], *experts: Expert) -> None:
        self._news.append(news)
        self._concerned.update(experts)
