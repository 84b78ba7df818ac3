"""The system's memory calls, run for real on this system."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from strata_core.machine import read_machine
from strata_core.memory.address import bytes_at
from strata_core.memory.platform import HUGE, populate_threads, rounded, system_memory, touch
from strata_core.memory.rules import COMPLEMENT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's calls")
MIB = 1 << 20


@pytest.fixture
def system():
    return system_memory()


def resident(address: int, nbytes: int, libc: ctypes.CDLL | None = None) -> int:
    """Pages in memory, by mincore."""
    pages = nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc = libc or ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(address, nbytes, found) == 0
    return int((np.frombuffer(found, np.uint8) & 1).sum())


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, MIB, 2 * MIB, 5 * MIB + 1])
def test_reserved_memory_is_aligned_zero_and_untouched(system, nbytes: int) -> None:
    reserved = system.reserve(nbytes)
    assert reserved.nbytes == rounded(nbytes, system.page)
    assert reserved.address % (HUGE if nbytes >= HUGE else system.page) == 0
    assert not reserved.large
    assert resident(reserved.address, reserved.nbytes) == 0
    data = bytes_at(reserved.address, reserved.nbytes)
    assert not data.any()
    data[-1] = 1
    system.free(reserved)
    assert not mapped(reserved.address)
    assert not mapped(reserved.address + reserved.nbytes - 1)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_populating_brings_in_exactly_the_pages_asked_for(system, old_kernel: bool) -> None:
    system._populates = not old_kernel
    reserved = system.reserve(MIB)
    start = reserved.address + 64 * system.page
    system.populate(start, 16 * system.page)
    assert resident(start, 16 * system.page) == 16
    assert resident(reserved.address, 64 * system.page) == 0
    assert not bytes_at(reserved.address, reserved.nbytes).any()
    system.free(reserved)


def test_an_old_kernel_is_found_out_once(system, monkeypatch) -> None:
    calls = []

    class Old:
        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            calls.append(advice)
            ctypes.set_errno(22)
            return -1

    reserved = system.reserve(MIB)
    libc, system._libc = system._libc, Old()
    for _ in range(3):
        system.populate(reserved.address, MIB)
    assert (calls, resident(reserved.address, MIB)) == ([23], MIB // system.page)
    system._libc = libc
    system.free(reserved)


def test_pages_that_are_not_there_are_an_error(system) -> None:
    reserved = system.reserve(MIB)
    system.free(reserved)
    with pytest.raises(OSError, match="allocate"):
        system.populate(reserved.address, MIB)


def seen_half_touched(system, work: Callable[[int, int], None]) -> bool:
    """Whether this thread, holding the interpreter's lock, sees some of what `work` touches.

    Where `work` holds the lock as well, all or none of it is there whenever this thread looks.
    """
    reserved = system.reserve(64 * MIB)
    thread = Thread(target=work, args=(reserved.address, reserved.nbytes))
    seen = False
    thread.start()
    while thread.is_alive():
        pages = resident(reserved.address, reserved.nbytes, ctypes.PyDLL(None))
        seen = seen or 0 < pages < reserved.nbytes // mmap.PAGESIZE
    thread.join()
    system.free(reserved)
    return seen


def test_touching_leaves_other_threads_running(system) -> None:
    """On a busy machine this thread may not have run during one call; then it looks again."""

    def work(address: int, nbytes: int) -> None:
        touch(address, nbytes, system.page)

    assert any(seen_half_touched(system, work) for _ in range(200))


def test_what_holds_the_lock_is_not_seen_half_touched(system) -> None:
    memset = ctypes.PyDLL(None).memset
    memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

    def work(address: int, nbytes: int) -> None:
        memset(address, 0, nbytes)

    assert not any(seen_half_touched(system, work) for _ in range(3))


def test_too_much_is_refused(system) -> None:
    with pytest.raises(OSError, match="allocate"):
        system.reserve(1 << 62)


def test_locked_pages_are_counted_by_the_kernel(system) -> None:
    def locked() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmLck:\s+(\d+) kB", status)[1]) * 1024

    before = locked()
    reserved = system.reserve(MIB)
    assert system.lock(reserved.address, 64 * 1024) is None
    assert locked() - before == 64 * 1024
    system.unlock(reserved.address, 32 * 1024)
    assert locked() - before == 32 * 1024
    system.free(reserved)
    assert locked() == before


LIMITED = """
import ctypes, resource, sys
from strata_core.memory.platform import system_memory
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32),
                ("inheritable", ctypes.c_uint32)]
nothing = (Data * 2)()
assert ctypes.CDLL(None).capset(ctypes.byref(Header(0x20080522, 0)), nothing) == 0
"""


def limited(code: str, limit: int) -> str:
    """What `code` prints in a process that may lock `limit` bytes and has no capabilities."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + code, str(limit)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_refused_lock_names_the_limit() -> None:
    code = """
system = system_memory()
reserved = system.reserve(4 << 20)
print(system.lock_limit())
print(system.lock(reserved.address, 1 << 20))
print(system.lock(reserved.address + (1 << 20), 2 << 20))
"""
    limit, first, second = limited(code, 2 << 20).splitlines()
    assert (int(limit), first) == (2 << 20, "None")
    assert second == "RLIMIT_MEMLOCK is 2.0 MiB (mlock: Cannot allocate memory)"


def test_the_chain_reports_a_limit_on_locking() -> None:
    code = """
from strata_core.memory.holding import Host
from strata_core.memory.ledger import Ledger
from strata_core.memory.pinned import PinnedAllocator
from strata_core.memory.rules import COMPLEMENT, PinSettings
from strata_core.testing.sim import SimRuntime
runtime = SimRuntime()
runtime.open_context(0)
ledger, found = Ledger(), []
allocator = PinnedAllocator(
    Host(runtime=runtime, ledger=ledger, system=system_memory()),
    PinSettings(complement=1 << 20), found.append)
region = allocator.reserve(4 << 20, [i << 20 for i in range(4)], COMPLEMENT)
print(region.path, sum(s.nbytes for s in region.spans if s.pinned))
print(found[0].what, "|", found[0].why)
allocator.close()
print(runtime.leaks(), ledger.outstanding())
"""
    path, said, left = limited(code, 2 << 20).splitlines()
    assert path == f"sliced {1 << 20}"
    assert said.startswith(
        "0.000977 GiB of the resident experts is not locked into RAM | RLIMIT_ME"
    )
    assert left == "[] ()"


def test_large_pages_are_taken_where_the_pool_has_them(system, monkeypatch, make_machine) -> None:
    from strata_core.machine import HugePages
    from strata_core.memory.platform import posix

    plain = make_machine(huge_pages=HugePages(2 * MIB, 4, 2))
    monkeypatch.setattr(posix, "read_machine", lambda: plain)
    asked = []
    real = system._map

    def fake(size: int, flags: int = 0) -> int:
        asked.append((size, flags))
        return real(size)

    system._map = fake
    reserved = system.reserve(3 * MIB, large=True)
    assert asked == [(4 * MIB, posix.MAP_HUGETLB)]
    assert reserved.large
    system.free(reserved)
    reserved = system.reserve(5 * MIB, large=True)
    assert not reserved.large, "the pool has too few"
    system.free(reserved)


def test_large_pages_go_through_the_chain(bench) -> None:
    """Needs three large pages: echo 8 > /proc/sys/vm/nr_hugepages."""
    pages = read_machine().huge_pages
    if pages is None or pages.free * pages.size < 6 * MIB:
        pytest.skip("the system's pool has no large pages to give")
    b = bench(large=True, complement=3 * MIB + 4096)
    region = b.allocator.reserve(5 * MIB, [0, MIB + 4096, 3 * MIB], COMPLEMENT)
    assert [reserved.large for reserved in b.system.held.values()] == [True]
    assert [s.nbytes for s in region.spans] == [MIB + 4096, 2 * MIB - 4096, 4096, 2 * MIB - 4096]
    bytes_at(region.address, region.nbytes)[:] = 1
    left = read_machine().huge_pages
    assert left is not None
    assert pages.free - left.free == -(-5 * MIB // pages.size)


def test_available_memory_is_what_the_machine_has(system) -> None:
    text = Path("/proc/meminfo").read_text()
    total = int(re.search(r"MemTotal:\s+(\d+) kB", text)[1]) * 1024
    assert 0 < system.available() <= total
    assert system.shared_rooms() is None


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(1, None, 1), (2, None, 1), (4, None, 3), (16, None, 8), (16, 2.5, 1), (16, 0.5, 1)],
)
def test_one_core_stays_free_and_eight_are_enough(make_machine, cores, quota, threads) -> None:
    assert populate_threads(make_machine(logical_cores=cores, cpu_quota=quota)) == threads
