"""Slots that a cache lends to prompts: the last ones, cut into buffers for experts on their way.

A prompt needs every expert of a layer once a chunk, decoding a few of them every round. So a
prompt takes slots of the cache; they are filled again afterwards. The last ones held the experts
that rank lowest when the cache was filled. Once experts change places any may be there: slots are
chosen by where they lie, since buffers are cut from slots that follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from attrs import frozen

from strata_core.cache.slots import SlotClass, SlotPool
from strata_core.interfaces import Expert

WAVE = 16
"""Experts that are computed together, and copied before that."""

AHEAD = 2
"""Layers whose experts are on their way to a device while earlier ones are computed."""

LEAST = 4
"""A cache with fewer slots lends none."""

OWN_WAVE = 8
"""As WAVE, of the fewest buffers that are taken where a cache has nothing to lend."""


@frozen
class Loan:
    """Buffers of one size by address, and the experts whose slots they lie in."""

    buffers: tuple[int, ...] = ()
    experts: tuple[Expert, ...] = ()


def wanted_buffers(outside: int, layers: int) -> int:
    """Buffers for the experts of the next layers that no slot holds, and the wave that is computed.

    `outside` are those of all `layers` together.
    """
    each = -(-outside // max(1, layers))
    return max(2 * WAVE, AHEAD * each + WAVE)


def lendable(cached: int, total: int, layers: int) -> int:
    """Slots of the largest size that a cache of `cached` of all experts lends at most.

    Half of them: what is lent has to be brought as well, once a chunk and once behind the prompt.
    """
    if cached < LEAST or cached >= total:
        return 0
    most = max(2 * OWN_WAVE, cached // 2)
    return min(cached, most, wanted_buffers(total - cached, layers))


def lend(
    pool: SlotPool | None, nbytes: int, most: int = 2 * WAVE, vacated: Collection[int] = ()
) -> Loan:
    """At most `most` buffers of `nbytes`, from the end of each class, large slots first.

    Slots that hold an expert and follow each other are one piece, from which buffers are cut
    whatever the slots' own size is. So are those at the addresses `vacated`, which nobody else
    uses. Others are left alone: an expert may be on its way there.
    """
    if pool is None or len(pool.places) + len(vacated) < LEAST:
        return Loan()
    holder = {address: expert for expert, address in pool.places.items()}
    usable = {*holder, *vacated}
    buffers: list[int] = []
    experts: list[Expert] = []
    for each in sorted(pool.classes, key=lambda c: -c.nbytes):
        for run in _runs(each, usable):
            left = most - len(buffers)
            count = min(left, len(run) * each.nbytes // nbytes)
            slots = run[: -(-count * nbytes // each.nbytes)]
            buffers += [slots[-1] + n * nbytes for n in range(count)]
            experts += [holder[address] for address in slots if address in holder]
    return Loan(tuple(buffers), tuple(experts))


def _runs(each: SlotClass, usable: Collection[int]) -> Iterator[list[int]]:
    """Usable slots that follow each other, from the last one down."""
    run: list[int] = []
    for address in map(each.slot, reversed(range(each.count))):
        if address in usable:
            run.append(address)
        elif run:
            yield run
            run = []
    if run:
        yield run


def own_buffers(cached: int, experts: int, layers: int, room: int) -> int:
    """Buffers to take for prompts beside a cache of `cached` of all experts; 0 where it lends.

    `experts` are those of each of `layers` layers; `room` is how many buffers may be taken to be
    ahead of the device. Two small waves are taken in any case.
    """
    if cached >= min(LEAST, experts * layers):
        return 0
    wanted = min(wanted_buffers(experts * layers - cached, layers), experts * layers)
    return max(2 * min(OWN_WAVE, experts), min(room, wanted))
