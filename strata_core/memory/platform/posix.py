"""Host memory on Linux and other POSIX systems, by the C library's calls.

Sources: mmap(2), madvise(2), mlock(2), getrlimit(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import sys
from functools import cache
from typing import Any

from strata_core.machine import read_machine
from strata_core.memory.platform import HUGE, Reserved, SharedRoom, rounded, touch

MADV_POPULATE_WRITE = 23
"""linux/mman.h, since Linux 5.14; older kernels answer EINVAL."""

MAP_HUGETLB = 0x40000
"""linux/mman.h: pages of the pool that the administrator set aside."""

_FAILED = ctypes.c_void_p(-1).value


class PosixMemory:
    """Anonymous private mappings."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._populates = sys.platform == "linux"

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return mmap.PAGESIZE

    def reserve(self, nbytes: int, *, large: bool = False) -> Reserved:
        """Map zeroed memory and, on Linux, advise huge pages; a refused advice costs nothing."""
        size = rounded(nbytes, self.page)
        if large:
            found = self._from_pool(size)
            if found is not None:
                return found
        if size < HUGE:
            return Reserved(self._map(size), size)
        start = self._map(size + HUGE)
        address = -(-start // HUGE) * HUGE
        self._unmap(start, address - start)
        self._unmap(address + size, start + HUGE - address)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._libc.madvise(address, size, mmap.MADV_HUGEPAGE)
        return Reserved(address, size)

    def free(self, reserved: Reserved) -> None:
        """Unmap; what was locked is unlocked by that."""
        self._unmap(reserved.address, reserved.nbytes)

    def populate(self, address: int, nbytes: int) -> None:
        """By one call to the kernel, else by writing a zero to every page."""
        if self._populates:
            if not self._libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            self._populates = False
        touch(address, nbytes, self.page)

    def lock(self, address: int, nbytes: int) -> str | None:
        """Lock pages by mlock."""
        if not self._libc.mlock(address, nbytes):
            return None
        code = ctypes.get_errno()
        limit = self.lock_limit()
        if limit is None:
            return f"mlock: {os.strerror(code)}"
        return f"RLIMIT_MEMLOCK is {limit / 2**20:.1f} MiB (mlock: {os.strerror(code)})"

    def unlock(self, address: int, nbytes: int) -> None:
        """Unlock pages by munlock."""
        self._libc.munlock(address, nbytes)

    def lock_limit(self) -> int | None:
        """RLIMIT_MEMLOCK, unless this process may exceed it."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit in (resource.RLIM_INFINITY, -1) or read_machine().memlock_limit is None:
            return None
        return limit

    def available(self) -> int:
        """What the kernel estimates, or the cgroup's room if less."""
        return read_machine().memory_available

    def shared_rooms(self) -> tuple[SharedRoom, ...] | None:
        """No adapter has such a budget here."""
        return None

    def _from_pool(self, size: int) -> Reserved | None:
        pages = read_machine().huge_pages
        if pages is None or not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        size = rounded(size, pages.size)
        if pages.free * pages.size < size:
            return None
        try:
            return Reserved(self._map(size, MAP_HUGETLB), size, large=True)
        except OSError:  # somebody else took them meanwhile
            return None

    def _map(self, size: int, flags: int = 0) -> int:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address: int = self._libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return address

    def _unmap(self, address: int, size: int) -> None:
        if size and self._libc.munmap(address, size):
            code = ctypes.get_errno()
            raise OSError(code, f"munmap: {os.strerror(code)}")


@cache
def _libc() -> Any:
    """The C library with the calls' types; its calls release the interpreter's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    for name in ("munmap", "mlock", "munlock"):
        getattr(libc, name).argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc
