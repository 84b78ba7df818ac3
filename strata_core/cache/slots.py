"""Slots: cells of a device's memory that hold one expert each, in classes by the size of a blob.

One pool serves all layers. A class is one allocation; its slots are the same size, so any expert of
that size can take any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from strata_core.interfaces import BlobLayout, Expert
from strata_core.memory.held import Held
from strata_core.plan.moving import ALIGNMENT, slot_bytes, spares_by_size

__all__ = [
    "ALIGNMENT", "SlotClass", "SlotPool", "beside_spares", "fitting", "make_slots", "slot_bytes",
]  # fmt: skip


@frozen
class SlotClass:
    """`count` slots of `nbytes` each, one after the other from `address`."""

    nbytes: int
    address: int
    count: int

    def slot(self, number: int) -> int:
        """Address of a slot."""
        return self.address + number * self.nbytes


@frozen(eq=False)
class SlotPool:
    """The slots of one device and who is in them. `places` is the address by expert.

    `spare` are empty slots, by size, that experts enter through: one that enters takes an empty
    slot, and the one that leaves empties its own. Both change between rounds only.
    """

    device: int
    classes: tuple[SlotClass, ...]
    places: dict[Expert, int]
    spare: dict[int, list[int]] = field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(c.nbytes * c.count for c in self.classes)

    def take_spare(self, layout: BlobLayout) -> int | None:
        """An empty slot for a blob of that layout, no longer empty; None where there is none."""
        spare = self.spare.get(slot_bytes(layout))
        return spare.pop() if spare else None

    def give_spare(self, layout: BlobLayout, slot: int) -> None:
        """A slot is empty, and nothing uses it any more."""
        self.spare[slot_bytes(layout)].append(slot)


def beside_spares(
    chosen: tuple[Expert, ...], layouts: Mapping[int, BlobLayout], each: int, at_once: int
) -> tuple[Expert, ...]:
    """The first of `chosen` that leave room for their spares in the slots of all of them.

    All, where one alone would not.
    """
    room = sum(slot_bytes(layouts[e.layer]) for e in chosen)
    kept = chosen
    while kept:
        spare = spares_by_size(kept, layouts, each, at_once)
        taken = sum(slot_bytes(layouts[e.layer]) for e in kept)
        if taken + sum(size * count for size, count in spare.items()) <= room:
            return kept
        kept = kept[:-1]
    return chosen


def make_slots(
    held: Held,
    device: int,
    experts: Sequence[Expert],
    layouts: Mapping[int, BlobLayout],
    spare: Mapping[int, int] | None = None,
) -> SlotPool:
    """A slot for each of `experts`, empty, and `spare` more by size.

    Raises Refused; then nothing is held.
    """
    counts = Counter(slot_bytes(layouts[e.layer]) for e in experts)
    counts.update(spare or {})
    classes: dict[int, SlotClass] = {}
    try:
        for nbytes, count in counts.items():
            purpose = f"an expert cache of {len(experts)} experts"
            classes[nbytes] = SlotClass(nbytes, held.device(device, nbytes * count, purpose), count)
    except BaseException:
        for done in classes.values():
            held.release(done.address)
        raise
    taken: Counter[int] = Counter()
    places = {}
    for expert in experts:
        nbytes = slot_bytes(layouts[expert.layer])
        places[expert] = classes[nbytes].slot(taken[nbytes])
        taken[nbytes] += 1
    left = {size: [c.slot(n) for n in range(taken[size], c.count)] for size, c in classes.items()}
    return SlotPool(device, tuple(classes.values()), places, left)


def fitting(
    ranking: Iterable[Expert], layouts: Mapping[int, BlobLayout], nbytes: int
) -> tuple[Expert, ...]:
    """The first experts of a ranking whose slots take at most `nbytes` together."""
    chosen = []
    for expert in ranking:
        nbytes -= slot_bytes(layouts[expert.layer])
        if nbytes < 0:
            break
        chosen.append(expert)
    return tuple(chosen)
