"""How fast experts of a device's cache may change places, and the room that this takes.

An expert enters through an empty slot, and one that leaves into an empty place of host memory, so
both kinds of memory have a few of them beside what is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from strata_core.interfaces import BlobLayout, Expert

ALIGNMENT = 256
"""Slots begin at multiples of this, as device memory does."""


@frozen
class Pace:
    """At most `swaps` experts change places every `every` rounds; 0 of either: none ever do."""

    every: int = 0
    swaps: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Pace:
        """From options by key; what is not there is 0."""
        return cls(int(options.get("adapt_every") or 0), int(options.get("adapt_swaps") or 0))

    @property
    def at_once(self) -> int:
        """How many begin in one round, so that the swaps of a period are spread over it."""
        return -(-self.swaps // self.every) if self.every > 0 else 0


def slot_bytes(layout: BlobLayout) -> int:
    """Bytes of a slot for blobs of a layout."""
    return -(-layout.nbytes // ALIGNMENT) * ALIGNMENT


def spares(count: int, total: int, at_once: int) -> int:
    """Empty slots beside `count` filled ones, where `total` experts want one.

    `at_once` is how many experts may begin to change places at a time.
    """
    return min(at_once, -(-count // 8)) if 0 < count < total else 0


def spares_by_size(
    experts: Iterable[Expert], layouts: Mapping[int, BlobLayout], each: int, at_once: int
) -> dict[int, int]:
    """Empty slots by size beside slots for `experts`; `each` is how many a layer has in all."""
    totals = Counter[int]()
    for layout in layouts.values():
        totals[slot_bytes(layout)] += each
    counts = Counter(slot_bytes(layouts[e.layer]) for e in experts)
    return {size: spares(count, totals[size], at_once) for size, count in counts.items()}
