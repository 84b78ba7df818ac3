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
from strata_core.plan.lending import LEAST, WAVE


@frozen
class Loan:
    """Buffers of one size by address, and the experts whose slots they lie in."""

    buffers: tuple[int, ...] = ()
    experts: tuple[Expert, ...] = ()


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
