"""The operating system's calls about host memory, behind one small interface.

`system_memory()` gives the calls of this system. Tests pass an object of their own instead.
"""

from __future__ import annotations

import sys
from typing import Protocol

from attrs import frozen

from strata_core.machine import Machine
from strata_core.memory.address import bytes_at

HUGE = 2 << 20
"""Memory is aligned to this, so that the system can back it with pages of that size."""


@frozen
class Reserved:
    """Memory of this process that was reserved and not touched yet.

    `address` and `nbytes` are multiples of the page. `large` says that it lies in pages of the
    system's pool of large ones, which are always in RAM.
    """

    address: int
    nbytes: int
    large: bool = False


@frozen
class SharedRoom:
    """An adapter's part of host memory that it shares: what it may have, and what it uses."""

    adapter: str
    budget: int
    used: int

    @property
    def room(self) -> int:
        """What it could still have."""
        return max(self.budget - self.used, 0)


class SystemMemory(Protocol):
    """What an operating system can be told to do with host memory.

    Sizes are bytes, addresses integers. Any thread may call any method; `populate`, `lock` and
    `unlock` work without the interpreter's lock.
    """

    @property
    def page(self) -> int:
        """Bytes of a page."""

    def reserve(self, nbytes: int, *, large: bool = False) -> Reserved:
        """Zeroed memory, aligned to a page and, where that is worth it, to `HUGE`.

        `large` asks for pages of the system's pool; where it has too few, plain ones are given.
        Raises OSError where the system refuses.
        """

    def free(self, reserved: Reserved) -> None:
        """Unmap what `reserve` gave. Nothing of it may be registered with a driver any more."""

    def populate(self, address: int, nbytes: int) -> None:
        """Have pages that were reserved and not written yet in memory, zeroed. Raises OSError."""

    def lock(self, address: int, nbytes: int) -> str | None:
        """Keep pages in RAM. None, or why not, naming the limit that is in the way."""

    def unlock(self, address: int, nbytes: int) -> None:
        """Undo `lock`; does nothing where the system does that on `free`."""

    def lock_limit(self) -> int | None:
        """Bytes that this process may lock in all; None where nothing is known to limit it."""

    def available(self) -> int:
        """Bytes that could be used now without pushing anything out, cgroups considered."""

    def shared_rooms(self) -> tuple[SharedRoom, ...] | None:
        """What each adapter may share of host memory; None where no such budget exists."""


def system_memory() -> SystemMemory:
    """The calls of the system that this runs on."""
    if sys.platform == "win32":
        from strata_core.memory.platform.windows import windows_memory

        return windows_memory()
    from strata_core.memory.platform.posix import PosixMemory

    return PosixMemory()


def populate_threads(machine: Machine) -> int:
    """Threads that populate at once: more than eight are no faster, and one core stays free."""
    granted = machine.cpu_quota or float(machine.logical_cores)
    return max(1, min(8, int(min(granted, machine.logical_cores)) - 1))


def touch(address: int, nbytes: int, page: int) -> None:
    """Write a zero to every page; NumPy does that without the interpreter's lock."""
    bytes_at(address, nbytes)[::page] = 0


def rounded(nbytes: int, page: int) -> int:
    """`nbytes` up to whole pages, one at least."""
    return max(-(-nbytes // page), 1) * page
