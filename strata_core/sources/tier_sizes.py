"""What a tier of a given size holds, and the ring that the others are read into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import frozen

from strata_core.interfaces import Expert, ExpertFiles, SourceContext
from strata_core.plan.moving import Pace, spares
from strata_core.sources.reading import Placing, place

Placings = Mapping[Expert, Placing]


@frozen(kw_only=True)
class TierRequest:
    """Which experts to keep: the first of `order` whose cells fit into `budget` bytes together.

    `spares` cells of the largest size stay empty, for experts that leave a device; `moving` says
    that experts may leave and enter devices.
    """

    order: Sequence[Expert]
    budget: int
    spares: int = 0
    moving: bool = False


def placings(experts: ExpertFiles) -> dict[Expert, Placing]:
    """Where the parts of every expert come to lie in its cell."""
    return {
        expert: place(experts.pieces(expert))
        for expert in (Expert(n, i) for n in experts.layouts for i in range(experts.count))
    }


def tier_order(
    ranking: Iterable[Expert] | None, excluded: Collection[Expert], experts: ExpertFiles
) -> list[Expert]:
    """The order in which a tier is filled.

    First what no device holds, the most asked for first; then what devices hold, from the end:
    slots that are lent to prompts are refilled from there. Without a ranking, experts are spread
    evenly over the layers.
    """
    if ranking is None:
        ranking = (Expert(layer, i) for i in range(experts.count) for layer in experts.layouts)
    order = list(ranking)
    outside = [expert for expert in order if expert not in excluded]
    return outside + [expert for expert in reversed(order) if expert in excluded]


def fitting(order: Iterable[Expert], placed: Placings, budget: int) -> list[Expert]:
    """The first experts whose cells fit into `budget` bytes; the first that does not ends it."""
    kept = []
    for expert in order:
        budget -= placed[expert].nbytes
        if budget < 0:
            break
        kept.append(expert)
    return kept


def ring_sizes(
    experts: ExpertFiles, placed: Placings, kept: Sequence[Expert], *, moving: bool
) -> list[int]:
    """The ring's cells: one for each expert of a layer that is not kept, in the worst layer.

    Where experts move between the tier and devices, any layer may lose all of its cells.
    """
    own = Counter[int]() if moving else Counter(expert.layer for expert in kept)
    most = max((experts.count - own[layer] for layer in experts.layouts), default=0)
    largest = max((each.nbytes for each in placed.values()), default=0)
    return [largest] * most


def starts(sizes: Iterable[int]) -> list[int]:
    """Where cells of these sizes begin."""
    found, at = [], 0
    for nbytes in sizes:
        found.append(at)
        at += nbytes
    return found


def tier_request(context: SourceContext, order: Sequence[Expert], budget: int) -> TierRequest:
    """What to keep, and within the budget a few empty cells where experts leave devices."""
    experts = context.experts
    placed = placings(experts)
    count = len(experts.layouts) * experts.count
    wanted = spares(len(context.excluded), count, Pace.of(context.options).at_once)
    # of a small tier no more than an eighth is kept empty
    wanted = min(wanted, len(fitting(order, placed, budget)) // 8)
    empty = wanted * max(p.nbytes for p in placed.values())
    moving = bool(context.excluded)
    return TierRequest(order=order, budget=budget - empty, spares=wanted, moving=moving)
