"""Host memory that its user may fill while the allocator still works on the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from strata_core.interfaces import Allocator, Region


class Prepared(Protocol):
    """Memory at `address`, of which more and more may be written. Any thread may call it."""

    @property
    def address(self) -> int:
        """Where it begins; final."""

    def wait(self, start: int, nbytes: int) -> None:
        """Wait until `nbytes` from the offset `start` may be written. Raises StrataError."""

    def region(self) -> Region:
        """The region, once all of it is settled. Raises StrataError."""

    def close(self) -> None:
        """Give the memory back to its allocator, finished or not. Again, it does nothing."""


@runtime_checkable
class PreparingAllocator(Protocol):
    """An allocator that also gives memory before all of it is ready."""

    def prepare(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Prepared:
        """As `Allocator.reserve`, but it returns as soon as the address is final."""


@frozen(eq=False)
class _Ready:
    """A finished region of an allocator that knows no other way."""

    _allocator: Allocator
    _region: Region
    _held: list[Region]

    @property
    def address(self) -> int:
        return self._region.address

    def wait(self, start: int, nbytes: int) -> None:
        del start, nbytes

    def region(self) -> Region:
        return self._region

    def close(self) -> None:
        while self._held:
            self._allocator.release(self._held.pop())


def prepare(allocator: Allocator, nbytes: int, cuts: Sequence[int], purpose: str) -> Prepared:
    """Host memory by the allocator's `prepare`, or by its `reserve`. Raises StrataError."""
    if isinstance(allocator, PreparingAllocator):
        return allocator.prepare(nbytes, cuts, purpose)
    region = allocator.reserve(nbytes, cuts, purpose)
    return _Ready(allocator, region, [region])
