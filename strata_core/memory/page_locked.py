"""Page-locked host memory: which ranges there are, and where a device finds them."""

from __future__ import annotations

from bisect import bisect_right
from threading import Lock

from attrs import define, field, frozen


@frozen
class Locked:
    """One allocation or registration; `alias` is what devices call its first byte, None if none.

    `registered` tells memory that was registered from memory that was allocated.
    """

    address: int
    nbytes: int
    alias: int | None
    registered: bool


@define(eq=False)
class PageLocked:
    """Disjoint ranges by address. Thread-safe."""

    _starts: list[int] = field(factory=list)
    _ranges: list[Locked] = field(factory=list)
    _lock: Lock = field(factory=Lock)

    def add(self, locked: Locked) -> None:
        """Take up a range that overlaps none of those that are there."""
        with self._lock:
            at = bisect_right(self._starts, locked.address)
            self._starts.insert(at, locked.address)
            self._ranges.insert(at, locked)

    def remove(self, address: int) -> Locked | None:
        """Forget the range that begins at `address`; None where none does."""
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if at < 0 or self._starts[at] != address:
                return None
            del self._starts[at]
            return self._ranges.pop(at)

    def holding(self, address: int) -> Locked | None:
        """The range that `address` lies in."""
        with self._lock:
            at = self._at(address)
            return None if at is None else self._ranges[at]

    def split(self, address: int, nbytes: int) -> bool:
        """Whether a piece of memory begins in one range and leaves it."""
        with self._lock:
            return self._at(address) != self._at(address + max(nbytes, 1) - 1)

    def _at(self, address: int) -> int | None:
        """The number of the range that `address` lies in; the lock is held."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._ranges[at].address + self._ranges[at].nbytes:
            return at
        return None

    def alias(self, address: int) -> int | None:
        """What devices call `address`."""
        locked = self.holding(address)
        if locked is None or locked.alias is None:
            return None
        return locked.alias + address - locked.address

    def all(self) -> tuple[Locked, ...]:
        """Every range, by address."""
        with self._lock:
            return tuple(self._ranges)
