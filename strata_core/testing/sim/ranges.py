"""Ranges of addresses that do not overlap, found by an address inside them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ranges(Generic[T]):
    """Maps ranges [start, end) to items, in ascending order. Not thread-safe.

    `changes` counts the ranges that were put in and taken out.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._items: list[T] = []

    def add(self, start: int, nbytes: int, item: T) -> None:
        """Put a range in; ValueError where it overlaps one that is there."""
        if self.overlapping(start, start + nbytes):
            raise ValueError("ranges overlap")
        self.changes += 1
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + nbytes)
        self._items.insert(at, item)

    def pop(self, start: int) -> T:
        """Take out the range that begins at `start`; KeyError where none does."""
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            raise KeyError(start)
        self.changes += 1
        del self._starts[at], self._ends[at]
        return self._items.pop(at)

    def at(self, address: int) -> T | None:
        """The item whose range holds `address`."""
        at = bisect_right(self._starts, address) - 1
        return self._items[at] if at >= 0 and address < self._ends[at] else None

    def overlapping(self, start: int, end: int) -> list[T]:
        """The items whose ranges share a byte with [start, end)."""
        first = bisect_right(self._ends, start)
        return self._items[first : bisect_left(self._starts, end, first)]

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)
