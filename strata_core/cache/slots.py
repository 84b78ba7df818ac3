"""Slots: cells of a device's memory that hold one expert each, in classes by the size of a blob.

One pool serves all layers. A class is one allocation; its slots are the same size, so any expert of
that size can take any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from strata_core.interfaces import BlobLayout, Expert
from strata_core.memory.held import Held

ALIGNMENT = 256
"""Slots begin at multiples of this, as device memory does."""


def slot_bytes(layout: BlobLayout) -> int:
    """Bytes of a slot for blobs of a layout."""
    return -(-layout.nbytes // ALIGNMENT) * ALIGNMENT


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
    """The slots of one device and who is in them. `places` is the address by expert."""

    device: int
    classes: tuple[SlotClass, ...]
    places: Mapping[Expert, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(c.nbytes * c.count for c in self.classes)


def make_slots(
    held: Held, device: int, experts: Sequence[Expert], layouts: Mapping[int, BlobLayout]
) -> SlotPool:
    """A slot for each of `experts`, empty. Raises Refused; then nothing is held."""
    counts = Counter(slot_bytes(layouts[e.layer]) for e in experts)
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
    return SlotPool(device, tuple(classes.values()), places)


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
