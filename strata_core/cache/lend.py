"""Slots that a cache lends to prompts: the last ones, cut into buffers for experts on their way.

A prompt needs every expert of a layer once a chunk, decoding a few of them every round. So a
prompt takes the slots whose experts are asked for least; they are filled again afterwards.
"""

from __future__ import annotations

from collections import Counter

from attrs import frozen

from strata_core.cache.slots import SlotPool
from strata_core.interfaces import Expert

WAVE = 16
"""Experts that are on their way to a device at once, while as many are being computed."""

LEAST = 4
"""A cache with fewer slots lends none."""

OWN_WAVE = 8
"""As WAVE, of the buffers that are taken where a cache has nothing to lend."""


@frozen
class Loan:
    """Buffers of one size by address, and the experts whose slots they lie in."""

    buffers: tuple[int, ...] = ()
    experts: tuple[Expert, ...] = ()


def lend(pool: SlotPool | None, nbytes: int) -> Loan:
    """At most two waves of buffers of `nbytes`, from the last slots of each class.

    Slots of a class follow each other, so buffers are cut from them whatever their own size is.
    """
    if pool is None or len(pool.places) < LEAST:
        return Loan()
    taken: Counter[int] = Counter()
    sizes = {at: c.nbytes for c in pool.classes for at in map(c.slot, range(c.count))}
    for address in reversed(list(pool.places.values())):
        if _cut(taken, nbytes) >= 2 * WAVE:
            break
        taken[sizes[address]] += 1
    buffers: list[int] = []
    lent: set[int] = set()
    for each in pool.classes:
        count = taken[each.nbytes]
        first = each.slot(each.count - count)
        buffers += [first + n * nbytes for n in range(count * each.nbytes // nbytes)]
        lent |= {each.slot(each.count - count + n) for n in range(count)}
    if not buffers:
        return Loan()
    experts = [expert for expert, address in pool.places.items() if address in lent]
    return Loan(tuple(buffers[: 2 * WAVE]), tuple(experts))


def own_buffers(cached: int, experts: int, layers: int) -> int:
    """Buffers to take for prompts beside a cache of `cached` of all experts; 0 where it lends.

    `experts` are those of each of `layers` layers.
    """
    if cached >= min(LEAST, experts * layers):
        return 0
    return 2 * min(OWN_WAVE, experts)


def _cut(taken: Counter[int], nbytes: int) -> int:
    return sum(count * size // nbytes for size, count in taken.items())
