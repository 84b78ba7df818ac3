"""Host memory shared by the CPU lane and the link: exact Q4_K experts on threads beside copies.

Run: python tests/device/bandwidth.py [--out FOLDER] [--gib N] [--binaries FOLDER]
The CPU kernel is `cpu_lane.c`, built here with gcc; it is checked against the oracle first.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from lab import HERE, HIDDEN, INNER, Module, Report, at, mapped
from oracle import product, random_rows
from registration import Memory

KEPT: list[Memory] = []
BLOB = 3 * HIDDEN * INNER // 256 * 144


def build_lane(*defines):
    """The stand-in CPU lane as a loaded library."""
    path = Path(tempfile.mkdtemp()) / "lane.so"
    flags = ["-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    flags += [f"-D{d}" for d in defines]
    subprocess.run(["gcc", *flags, str(HERE / "cpu_lane.c"), "-o", str(path)], check=True)
    lane = ctypes.CDLL(str(path))
    lane.lane_kernel.restype = ctypes.c_char_p
    lane.lane_bandwidth.restype = lane.read_bandwidth.restype = ctypes.c_double
    return lane


def pointer(a):
    return a.ctypes.data_as(ctypes.c_void_p)


def lane_is_exact(lane):
    rng = np.random.default_rng(0)
    raw = random_rows("Q4K", 96, HIDDEN, rng)
    x = rng.standard_normal(HIDDEN).astype(np.float32)
    y = np.zeros(96, np.float32)
    lane.lane_rows(pointer(raw), 96, HIDDEN, pointer(x), pointer(y))
    return np.array_equal(y.view(np.int32), product("Q4K", raw, x, 2).view(np.int32))


def run_lane(lane, arena, threads, picks, seconds=0.8, pin=0):
    us = ctypes.c_double()
    rate = lane.lane_bandwidth(
        pointer(arena),
        ctypes.c_long(arena.size // BLOB),
        ctypes.c_long(BLOB),
        HIDDEN,
        INNER,
        threads,
        picks,
        ctypes.c_double(seconds),
        pin,
        ctypes.byref(us),
    )
    return rate, us.value


def run_reads(lane, arena, threads, seconds=0.6):
    size = ctypes.c_size_t(arena.size)
    return lane.read_bandwidth(pointer(arena), size, threads, ctypes.c_double(seconds), 0)


class Link:
    """Traffic on the link from a thread of its own: copies of blobs, or a reading kernel."""

    def __init__(self, how, alias, nbytes, layer):
        import cupy as cp

        self.how, self.alias, self.count = how, alias, nbytes // BLOB
        self.moved, self._go, self._layer = 0, True, layer
        self._slots = cp.empty((8, BLOB), cp.uint8)
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        import cupy as cp
        from cupy.cuda import runtime

        out, rng = cp.zeros(1, cp.uint32), np.random.default_rng(1)
        pending = []
        with self._stream:
            while self._go:
                if self.how == "copies":
                    for i, e in enumerate(rng.integers(0, self.count, 32)):
                        runtime.memcpyAsync(
                            self._slots[i % 8].data.ptr,
                            self.alias + int(e) * BLOB,
                            BLOB,
                            runtime.memcpyHostToDevice,
                            self._stream.ptr,
                        )
                    nbytes = 32 * BLOB
                else:
                    n = 1 << 27
                    start = int(rng.integers(0, self.count * BLOB - n)) & ~4095
                    args = (at(self.alias + start, (n,), np.uint8), np.uint64(n // 16), out)
                    self._layer("read_wide", (264,), (256,), args)
                    nbytes = n
                event = cp.cuda.Event()
                event.record(self._stream)
                pending.append((event, nbytes))
                if len(pending) > 2:
                    first, size = pending.pop(0)
                    first.synchronize()
                    self.moved += size
            self._stream.synchronize()

    def __enter__(self):
        self._thread.start()
        time.sleep(0.1)
        self.moved, self._start = 0, time.perf_counter()
        return self

    def rate(self):
        return self.moved / (time.perf_counter() - self._start) / 1e9

    def __exit__(self, *_):
        self._go = False
        self._thread.join()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out")
    ap.add_argument("--binaries")
    ap.add_argument("--gib", type=int, default=4)
    ap.add_argument("--prefetch-only", action="store_true")
    a = ap.parse_args()
    if a.prefetch_only:
        prefetch(a.out, (a.gib << 30) // BLOB)
        return
    lane = build_lane()
    print("cpu lane:", lane.lane_kernel().decode(), "exact:", lane_is_exact(lane), flush=True)
    layer = Module("layer.cu", binaries=a.binaries)
    count = (a.gib << 30) // BLOB
    small = np.tile(random_rows("Q4K", BLOB // 144, 256, np.random.default_rng(0)).reshape(-1), 2)
    report = Report(
        "bandwidth",
        (
            "memory",
            "cpu work",
            "threads",
            "link work",
            "cpu GB/s",
            "link GB/s",
            "sum",
            "us a layer",
        ),
        a.out,
    )
    rate, us = run_lane(lane, small, 1, 2, 0.5)
    report.add("in cache", "lane, 2", 1, "nothing", rate, 0.0, rate, us)
    cores = len(os.sched_getaffinity(0))
    for kind in ("one pinned allocation", "huge pages, registered"):
        arena, alias = (mapped if kind[0] == "o" else huge_arena)(count * BLOB)
        fill(arena, small[:BLOB])
        for how in ("nothing", "copies", "kernel"):
            share(report, kind, lane, (arena, alias), layer, how, cores)


def prefetch(out, count):
    """How far ahead the lane should ask for its rows, on threads alone."""
    arena, _ = mapped(count * BLOB)
    fill(arena, random_rows("Q4K", BLOB // 144, 256, np.random.default_rng(0)).reshape(-1))
    report = Report("prefetch", ("bytes ahead", "threads", "GB/s", "us a layer of 8"), out)
    threads = len(os.sched_getaffinity(0)) - 1
    for ahead in (0, 1152, 2304, 4608, 9216):
        lane = build_lane(f"AHEAD={ahead}")
        for n in (1, 8, threads):
            report.add(ahead, n, *run_lane(lane, arena, n, 8, 0.5))


def huge_arena(nbytes):
    """As `mapped`, of populated memory with huge pages advised, registered as one span."""
    from cupy.cuda import runtime

    memory = Memory((nbytes + (2 << 20) - 1) & ~((2 << 20) - 1), huge=True)
    memory.populate_all(16)
    runtime.hostRegister(memory.address, memory.nbytes, 3)
    KEPT.append(memory)
    host = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(memory.address), np.uint8)
    return host, runtime.pointerGetAttributes(memory.address).devicePointer


def fill(arena, blob):
    view = arena.reshape(-1, BLOB)
    threads = [
        threading.Thread(target=lambda i=i: view[i::8].__setitem__(slice(None), blob))
        for i in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def share(report, kind, lane, memory, layer, how, cores):
    """CPU work on some threads beside one sort of traffic on the link."""
    arena, alias = memory
    if how != "nothing":
        with Link(how, alias, arena.size, layer) as link:
            time.sleep(0.6)
            report.add(kind, "none", 0, how, 0.0, link.rate(), link.rate(), 0.0)
    for n in sorted({4, 8, 12, cores - 1}):
        for work in ("reads", "lane, 8", "lane, 4", "lane, 2"):
            if n != cores - 1 and (work in ("lane, 2", "lane, 4") or how == "kernel"):
                continue
            us = 0.0
            with Link(how, alias, arena.size, layer) if how != "nothing" else Idle() as busy:
                if work == "reads":
                    cpu = run_reads(lane, arena, n)
                else:
                    cpu, us = run_lane(lane, arena, n, int(work[-1]), 0.6)
                rate = busy.rate()
            report.add(kind, work, n, how, cpu, rate, cpu + rate, us)


class Idle:
    """No traffic on the link."""

    def rate(self):
        return 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


if __name__ == "__main__":
    main()
