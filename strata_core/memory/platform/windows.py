"""Host memory on Windows, by the calls of kernel32.

Sources: Microsoft's reference of VirtualAlloc, VirtualLock ("to lock more pages, an application
must first call SetProcessWorkingSetSize"), GetLargePageMinimum, and "Large-Page Support".
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from threading import Lock
from typing import Any

from strata_core.machine import read_machine
from strata_core.memory.platform import Reserved, SharedRoom, rounded, touch

MEM_COMMIT, MEM_RESERVE, MEM_RELEASE, MEM_LARGE_PAGES = 0x1000, 0x2000, 0x8000, 0x20000000
PAGE_READWRITE = 0x04
SLACK = 16 << 20
"""Working set beside what is locked: the process's own code and data stay usable."""

_WORDS = {
    8: "not enough memory",
    87: "a parameter was not accepted",
    1314: "the privilege is missing",
    1450: "not enough system resources",
    1453: "the working set's quota is exceeded",
    1455: "the paging file is too small",
}


class WindowsMemory:
    """Committed memory by VirtualAlloc.

    `kernel32` is the library, `last_error` its thread's last error code; `enable_large_pages`
    switches on the privilege that large pages need and says whether that worked; `rooms` asks the
    adapters' budgets.
    """

    def __init__(
        self,
        kernel32: Any,
        last_error: Callable[[], int],
        enable_large_pages: Callable[[], bool],
        rooms: Callable[[], tuple[SharedRoom, ...] | None],
    ) -> None:
        self._kernel32 = kernel32
        self._last_error = last_error
        self._enable_large_pages = enable_large_pages
        self._rooms = rooms
        self._guard = Lock()
        self._locked = 0
        self._before = (0, 0)

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return mmap.PAGESIZE

    def reserve(self, nbytes: int, *, large: bool = False) -> Reserved:
        """Reserve and commit; large pages where the account may have them."""
        if large:
            found = self._large(nbytes)
            if found is not None:
                return found
        size = rounded(nbytes, self.page)
        address = self._allocate(size, MEM_RESERVE | MEM_COMMIT)
        if not address:
            raise self._error("VirtualAlloc")
        return Reserved(address, size)

    def free(self, reserved: Reserved) -> None:
        """Release; VirtualFree takes the whole of what VirtualAlloc gave."""
        if not self._kernel32.VirtualFree(
            ctypes.c_void_p(reserved.address), ctypes.c_size_t(0), ctypes.c_uint32(MEM_RELEASE)
        ):
            raise self._error("VirtualFree")

    def populate(self, address: int, nbytes: int) -> None:
        """Write a zero to every page: Windows has no call that does it."""
        touch(address, nbytes, self.page)

    def lock(self, address: int, nbytes: int) -> str | None:
        """Raise the working set by what is to be locked, then lock; undo the first on a refusal."""
        with self._guard:
            if not self._locked:
                self._before = self._sizes()
            low, _ = self._before
            if not self._hold(self._locked + nbytes):
                why = self._why()
                self._hold(self._locked)
                wanted = low + self._locked + nbytes + SLACK
                return (
                    f"the working set was {low / 2**20:.1f} MiB and cannot be raised to "
                    f"{wanted / 2**20:.1f} MiB (SetProcessWorkingSetSize: {why})"
                )
            if self._call("VirtualLock", address, nbytes):
                self._locked += nbytes
                return None
            why = self._why()
            self._hold(self._locked)
            return f"the working set of {low / 2**20:.1f} MiB does not hold it (VirtualLock: {why})"

    def unlock(self, address: int, nbytes: int) -> None:
        """Unlock, and lower the working set again."""
        with self._guard:
            if self._call("VirtualUnlock", address, nbytes):
                self._locked -= nbytes
                self._hold(self._locked)

    def lock_limit(self) -> int | None:
        """The working set decides, and it is raised as needed."""
        return None

    def available(self) -> int:
        """Physical memory that is free or standing by."""
        return read_machine().memory_available

    def shared_rooms(self) -> tuple[SharedRoom, ...] | None:
        """The adapters' shared-memory budgets; None where they cannot be asked."""
        return self._rooms()

    def _large(self, nbytes: int) -> Reserved | None:
        smallest = int(self._kernel32.GetLargePageMinimum())
        if not smallest or not self._enable_large_pages():
            return None
        size = rounded(nbytes, smallest)
        address = self._allocate(size, MEM_RESERVE | MEM_COMMIT | MEM_LARGE_PAGES)
        return Reserved(address, size, large=True) if address else None

    def _allocate(self, size: int, kind: int) -> int:
        return (
            self._kernel32.VirtualAlloc(
                None, ctypes.c_size_t(size), ctypes.c_uint32(kind), ctypes.c_uint32(PAGE_READWRITE)
            )
            or 0
        )

    def _sizes(self) -> tuple[int, int]:
        low, high = ctypes.c_size_t(), ctypes.c_size_t()
        self._kernel32.GetProcessWorkingSetSize(
            self._process(), ctypes.byref(low), ctypes.byref(high)
        )
        return low.value, high.value

    def _hold(self, nbytes: int) -> bool:
        """Let the working set hold `nbytes` beside what it was before anything was locked."""
        low, high = self._before
        more = nbytes + SLACK if nbytes else 0
        return bool(
            self._kernel32.SetProcessWorkingSetSize(
                self._process(), ctypes.c_size_t(low + more), ctypes.c_size_t(max(high, low) + more)
            )
        )

    def _process(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._kernel32.GetCurrentProcess())

    def _call(self, name: str, address: int, nbytes: int) -> bool:
        function = getattr(self._kernel32, name)
        return bool(function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)))

    def _why(self) -> str:
        code = self._last_error()
        return f"error {code}, {_WORDS.get(code, 'see the system error codes')}"

    def _error(self, name: str) -> OSError:
        return OSError(f"{name}: {self._why()}")


def windows_memory() -> WindowsMemory:
    """The calls of this computer's Windows."""
    from strata_core.memory.platform.dxgi import read_rooms
    from strata_core.memory.platform.privilege import enable_lock_memory

    library: Any = vars(ctypes)["WinDLL"]
    last_error: Callable[[], int] = vars(ctypes)["get_last_error"]
    kernel32 = library("kernel32", use_last_error=True)
    kernel32.VirtualAlloc.restype = ctypes.c_void_p
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    kernel32.GetLargePageMinimum.restype = ctypes.c_size_t
    advapi32 = library("advapi32", use_last_error=True)
    return WindowsMemory(
        kernel32,
        last_error,
        lambda: enable_lock_memory(kernel32, advapi32, last_error),
        lambda: read_rooms(library),
    )
