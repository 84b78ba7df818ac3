"""Windows' calls: which are made, in which order, with what; on a library that records them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strata_core.memory.platform import HUGE, SharedRoom
from strata_core.memory.platform.posix import PosixMemory
from strata_core.memory.platform.privilege import TokenPrivileges, enable_lock_memory
from strata_core.memory.platform.windows import SLACK, WindowsMemory

MIB = 1 << 20
COMMIT, LARGE = 0x3000, 0x20003000


def value(argument: Any) -> Any:
    return getattr(argument, "value", argument)


class Kernel32:
    """kernel32 with a working set and a list of what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0
        self.fails: dict[str, int] = {}
        self.large = 0
        self.sizes = (MIB, 2 * MIB)
        self.next = 0x10000

    def _done(self, name: str, *args: Any) -> bool:
        self.calls.append((name, *map(value, args)))
        self.error = self.fails.get(name, 0)
        return not self.error

    def VirtualAlloc(self, address, size, kind, protection):  # noqa: N802
        assert address is None
        assert value(protection) == 0x04
        fine = self._done("VirtualAlloc", size, kind)
        if value(kind) == LARGE and "large" in self.fails:
            self.error, fine = self.fails["large"], False
        return self.next if fine else None

    def VirtualFree(self, address, size, kind):  # noqa: N802
        return self._done("VirtualFree", address, size, kind)

    def VirtualLock(self, address, size):  # noqa: N802
        return self._done("VirtualLock", address, size)

    def VirtualUnlock(self, address, size):  # noqa: N802
        return self._done("VirtualUnlock", address, size)

    def GetCurrentProcess(self):  # noqa: N802
        return -1

    def GetLargePageMinimum(self):  # noqa: N802
        return self.large

    def GetProcessWorkingSetSize(self, process, low, high):  # noqa: N802
        assert value(process) == ctypes.c_void_p(-1).value
        low._obj.value, high._obj.value = self.sizes
        return 1

    def SetProcessWorkingSetSize(self, process, low, high):  # noqa: N802
        if not self._done("SetProcessWorkingSetSize", low, high):
            return 0
        assert value(low) <= value(high)
        self.sizes = (value(low), value(high))
        return 1


class Machine:
    def __init__(self) -> None:
        self.kernel32 = Kernel32()
        self.privileged = False
        self.rooms: tuple[SharedRoom, ...] | None = None
        self.memory = WindowsMemory(
            self.kernel32,
            lambda: self.kernel32.error,
            lambda: self.privileged,
            lambda: self.rooms,
        )


@pytest.fixture
def windows() -> Machine:
    return Machine()


def test_memory_is_reserved_and_committed_in_one_call(windows) -> None:
    reserved = windows.memory.reserve(5000)
    assert windows.kernel32.calls == [("VirtualAlloc", 8192, COMMIT)]
    assert (reserved.address, reserved.nbytes, reserved.large) == (0x10000, 8192, False)
    windows.memory.free(reserved)
    assert windows.kernel32.calls[1:] == [("VirtualFree", 0x10000, 0, 0x8000)], "not the whole"


def test_a_refusal_tells_the_systems_error(windows) -> None:
    windows.kernel32.fails = {"VirtualAlloc": 1455, "VirtualFree": 87}
    with pytest.raises(OSError, match="VirtualAlloc: error 1455, the paging file is too small"):
        windows.memory.reserve(1)


@pytest.mark.parametrize(
    ("smallest", "privileged", "refused", "large"),
    [(2 * MIB, True, 0, True), (0, True, 0, False), (2 * MIB, False, 0, False),
     (2 * MIB, True, 1450, False)],
)  # fmt: skip
def test_large_pages_need_a_size_a_privilege_and_memory(
    windows, smallest: int, privileged: bool, refused: int, large: bool
) -> None:
    windows.kernel32.large, windows.privileged = smallest, privileged
    if refused:
        windows.kernel32.fails = {"large": refused}
    reserved = windows.memory.reserve(3 * MIB, large=True)
    assert (reserved.large, reserved.nbytes) == ((True, 4 * MIB) if large else (False, 3 * MIB))
    kinds = [call[2] for call in windows.kernel32.calls]
    assert kinds == ([LARGE] if large else [LARGE, COMMIT] if refused else [COMMIT])


def test_the_working_set_is_raised_before_pages_are_locked(windows) -> None:
    assert windows.memory.lock(0x10000, 64 * MIB) is None
    more = 64 * MIB + SLACK
    assert windows.kernel32.calls == [
        ("SetProcessWorkingSetSize", MIB + more, 2 * MIB + more),
        ("VirtualLock", 0x10000, 64 * MIB),
    ]
    windows.memory.lock(0x20000, MIB)
    assert windows.kernel32.sizes == (MIB + more + MIB, 2 * MIB + more + MIB), "slack counts once"
    windows.memory.unlock(0x20000, MIB)
    windows.memory.unlock(0x10000, 64 * MIB)
    assert windows.kernel32.sizes == (MIB, 2 * MIB), "the working set is not what it was"


def test_a_lock_that_is_refused_names_the_working_set_and_lowers_it_again(windows) -> None:
    windows.kernel32.fails = {"VirtualLock": 1453}
    why = windows.memory.lock(0x10000, 64 * MIB)
    assert why is not None
    assert "the working set of 1.0 MiB does not hold it" in why
    assert "error 1453, the working set's quota is exceeded" in why
    assert windows.kernel32.sizes == (MIB, 2 * MIB)


def test_a_working_set_that_cannot_be_raised_is_named(windows) -> None:
    windows.kernel32.fails = {"SetProcessWorkingSetSize": 1450}
    why = windows.memory.lock(0x10000, 64 * MIB)
    assert why is not None
    assert "was 1.0 MiB and cannot be raised to 81.0 MiB" in why
    assert "error 1450, not enough system resources" in why
    assert {call[0] for call in windows.kernel32.calls} == {"SetProcessWorkingSetSize"}


def test_pages_are_populated_by_writing_to_each(windows) -> None:
    real = PosixMemory()
    reserved = real.reserve(HUGE)
    windows.memory.populate(reserved.address, reserved.nbytes)
    assert windows.kernel32.calls == []
    real.free(reserved)


def test_limits_and_rooms(windows) -> None:
    assert windows.memory.lock_limit() is None
    assert windows.memory.shared_rooms() is None
    windows.rooms = (SharedRoom("adapter", 10, 3),)
    assert [room.room for room in windows.memory.shared_rooms()] == [7]


# --- the privilege -----------------------------------------------------------------------------


class Advapi32:
    def __init__(self, kernel32: Kernel32, fails: str = "", error: int = 0) -> None:
        self.kernel32, self.fails, self.after = kernel32, fails, error
        self.enabled: tuple[int, int, int] | None = None
        self.closed = 0
        kernel32.CloseHandle = self._close

    def _close(self, token) -> int:
        assert value(token) == 77
        self.closed += 1
        return 1

    def OpenProcessToken(self, process, access, token):  # noqa: N802
        assert value(access) == 0x28
        token._obj.value = 77
        return self.fails != "open"

    def LookupPrivilegeValueW(self, system, name, luid):  # noqa: N802
        assert (system, name) == (None, "SeLockMemoryPrivilege")
        ctypes.memmove(luid, (4).to_bytes(8, "little"), 8)
        return self.fails != "lookup"

    def AdjustTokenPrivileges(self, token, disable, new, *rest):  # noqa: N802
        wanted: TokenPrivileges = new._obj
        self.enabled = (wanted.count, wanted.luid_low, wanted.attributes)
        assert value(disable) == 0
        self.kernel32.error = self.after
        return self.fails != "adjust"


@pytest.mark.parametrize(
    ("fails", "error", "granted", "closed"),
    [("", 0, True, 1), ("", 1300, False, 1), ("open", 0, False, 0), ("lookup", 0, False, 1),
     ("adjust", 5, False, 1)],
)  # fmt: skip
def test_the_privilege_is_asked_for(fails: str, error: int, granted: bool, closed: int) -> None:
    kernel32 = Kernel32()
    advapi32 = Advapi32(kernel32, fails, error)
    assert enable_lock_memory(kernel32, advapi32, lambda: kernel32.error) is granted
    assert advapi32.closed == closed
    if granted:
        assert advapi32.enabled == (1, 4, 2)
