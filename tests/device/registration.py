"""How fast host memory becomes readable by the link: one allocation, or populated slices.

Run: python tests/device/registration.py [--out FOLDER] [--gib N] [--file PATH]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import threading
from pathlib import Path

from lab import Report, wall

SLICE = 352 << 20
POPULATE_WRITE = 23
libc = ctypes.CDLL(None, use_errno=True)


def spread_threads(count, body):
    """Run body(i) on `count` threads; ctypes and CuPy calls in it run at once."""
    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


class Memory:
    """Anonymous memory, 2 MiB aligned, with or without huge pages advised."""

    def __init__(self, nbytes, huge):
        self._map = mmap.mmap(-1, nbytes + (2 << 20))
        raw = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address, self.nbytes = (raw + (2 << 20) - 1) & ~((2 << 20) - 1), nbytes
        advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
        libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(nbytes), advice)

    def populate(self, start, nbytes):
        code = libc.madvise(
            ctypes.c_void_p(self.address + start), ctypes.c_size_t(nbytes), POPULATE_WRITE
        )
        if code:
            raise OSError(ctypes.get_errno(), "populate")

    def populate_all(self, threads):
        part = (self.nbytes // threads) & ~((2 << 20) - 1)

        def body(i):
            end = self.nbytes if i == threads - 1 else (i + 1) * part
            self.populate(i * part, end - i * part)

        spread_threads(threads, body)


def register(memory, slice_bytes):
    from cupy.cuda import runtime

    for at in range(0, memory.nbytes, slice_bytes):
        size = min(slice_bytes, memory.nbytes - at)
        runtime.hostRegister(memory.address + at, size, 3)


def register_on_threads(memory, threads):
    """Untouched slices, registered by several threads at once."""
    from cupy.cuda import runtime

    starts = list(range(0, memory.nbytes, SLICE))

    def body(worker):
        for at in starts[worker::threads]:
            runtime.hostRegister(memory.address + at, min(SLICE, memory.nbytes - at), 3)

    spread_threads(threads, body)


def unregister(memory, slice_bytes):
    from cupy.cuda import runtime

    for at in range(0, memory.nbytes, slice_bytes):
        runtime.hostUnregister(memory.address + at)


def one_allocation(report, nbytes):
    from cupy.cuda import runtime

    held = []
    took = wall(lambda: held.append(runtime.hostAlloc(nbytes, 3)))
    report.add("one pinned allocation", "-", "-", took, nbytes / took / 2**30)
    took = wall(lambda: runtime.freeHost(held[0]))
    report.add("  its release", "-", "-", took, nbytes / took / 2**30)


def slices(report, nbytes, huge, threads, overlapped):
    """Populate then register; overlapped: a thread registers slice i while i+1 is populated."""
    memory = Memory(nbytes, huge)
    page = "huge pages advised" if huge else "4 KiB pages"
    if threads == 0:
        took = wall(lambda: register(memory, SLICE))
        report.add("register untouched slices", page, 0, took, nbytes / took / 2**30)
    elif not overlapped:
        first = wall(lambda: memory.populate_all(threads))
        report.add("  populate", page, threads, first, nbytes / first / 2**30)
        second = wall(lambda: register(memory, SLICE))
        report.add("  register populated slices", page, threads, second, nbytes / second / 2**30)
        both = first + second
        report.add("populate, then register", page, threads, both, nbytes / both / 2**30)
    else:
        took = wall(lambda: pipelined(memory, threads))
        report.add("populate | register, pipelined", page, threads, took, nbytes / took / 2**30)
    took = wall(lambda: unregister(memory, SLICE))
    report.add("  unregister", page, threads, took, nbytes / took / 2**30)


def pipelined(memory, threads, ready=None):
    """Slices are populated by `threads` threads each in turn and registered as they come."""
    from cupy.cuda import runtime

    starts = list(range(0, memory.nbytes, SLICE))
    done = [threading.Event() for _ in starts]

    def populate():
        for at, event in zip(starts, done, strict=True):
            size = min(SLICE, memory.nbytes - at)
            part = ((size + threads - 1) // threads + (2 << 20) - 1) & ~((2 << 20) - 1)

            def body(i, at=at, size=size, part=part):
                if i * part < size:
                    memory.populate(at + i * part, min(part, size - i * part))

            spread_threads(threads, body)
            event.set()

    worker = threading.Thread(target=populate)
    worker.start()
    for i, (at, event) in enumerate(zip(starts, done, strict=True)):
        event.wait()
        runtime.hostRegister(memory.address + at, min(SLICE, memory.nbytes - at), 3)
        if ready:
            ready[i].set()
    worker.join()


def read_slices(path, memory, gates, threads, direct):
    """Read the file into the slices; slice i once it and the next are registered."""
    chunk = 4 << 20
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    starts = list(range(0, memory.nbytes, SLICE))

    def body(worker):
        fd = os.open(path, flags)
        for i, at in enumerate(starts):
            for gate in gates[i : i + 2]:
                gate.wait()
            size = min(SLICE, memory.nbytes - at)
            for off in range(worker * chunk, size, threads * chunk):
                n = min(chunk, size - off)
                view = (ctypes.c_char * n).from_address(memory.address + at + off)
                got = os.preadv(fd, [view], at + off)
                if got != n:
                    raise OSError(f"short read of {got} at {at + off}")
        os.close(fd)

    spread_threads(threads, body)


def with_file(report, nbytes, path):
    block = os.urandom(16 << 20)

    def write():
        with Path(path).open("wb") as f:
            for _ in range(0, nbytes, len(block)):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())

    took = wall(write)
    report.add("write the file", "-", 1, took, nbytes / took / 2**30)
    for threads in (4, 8):
        memory = Memory(nbytes, huge=True)
        memory.populate_all(16)
        opened = [threading.Event() for _ in range(0, nbytes, SLICE)]
        for e in opened:
            e.set()
        took = wall(lambda t=threads, m=memory, o=opened: read_slices(path, m, o, t, True))
        report.add("unbuffered read alone", "huge", threads, took, nbytes / took / 2**30)
    for direct in (True, False):
        memory = Memory(nbytes, huge=True)
        gates = [threading.Event() for _ in range(0, nbytes, SLICE)]

        def both(memory=memory, gates=gates, direct=direct):
            reader = threading.Thread(target=read_slices, args=(path, memory, gates, 8, direct))
            reader.start()
            pipelined(memory, 8, gates)
            reader.join()

        took = wall(both)
        label = "unbuffered" if direct else "cached"
        report.add(f"populate | register | {label} read", "huge", 8, took, nbytes / took / 2**30)
        unregister(memory, SLICE)
    Path(path).unlink()


def main():
    import cupy as cp

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out")
    ap.add_argument("--gib", type=int, default=8)
    ap.add_argument("--file")
    a = ap.parse_args()
    cp.cuda.Device().synchronize()
    report = Report("registration", ("what", "pages", "threads", "s", "GiB/s"), a.out)
    for line in ("/sys/kernel/mm/transparent_hugepage/enabled",):
        if Path(line).exists():
            print(line, Path(line).read_text().strip())
    nbytes = a.gib << 30
    # A virtual machine's memory grows with use: pay that once.
    took = wall(lambda: Memory(nbytes, huge=True).populate_all(16))
    report.add("first populate of this machine", "huge", 16, took, nbytes / took / 2**30)
    one_allocation(report, nbytes)
    one_allocation(report, nbytes)
    for huge in (False, True):
        for threads, overlapped in ((0, False), (8, False), (16, False), (8, True), (16, True)):
            slices(report, nbytes, huge, threads, overlapped)
    for huge in (False, True):
        memory = Memory(nbytes, huge)
        took = wall(lambda m=memory: register_on_threads(m, 8))
        page = "huge pages advised" if huge else "4 KiB pages"
        report.add("register untouched slices at once", page, 8, took, nbytes / took / 2**30)
        unregister(memory, SLICE)
    if a.file:
        with_file(report, 2 << 30, a.file)


if __name__ == "__main__":
    main()
