"""Page-locking on a real driver: each path's rate, its copies and its bytes; the pin probe.

Run: python tests/device/check_memory.py [--runtime MODULE:CLASS] [--gib N] [--slice-mib N]

For each path: seconds until the region is ready while eight threads fill it, then every slice is
copied to the device and back and compared. Ends with 1 where bytes differ or anything is left.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from strata_core.errors import DeviceError
from strata_core.interfaces import Region
from strata_core.machine import read_machine
from strata_core.memory.address import bytes_at
from strata_core.memory.holding import Host
from strata_core.memory.ledger import Ledger
from strata_core.memory.pinned import PinnedAllocator
from strata_core.memory.platform import populate_threads, system_memory
from strata_core.memory.probe_pins import probe_pins
from strata_core.memory.rules import COMPLEMENT, PinSettings

WAYS = {
    "path 1": PinSettings(complement="all"),
    "path 2": PinSettings(),
    "path 2, half": None,
    "pinned prefix": None,
    "path 3": PinSettings(complement=0),
}
FILLERS = 8


def fill(loan: Any, nbytes: int, slice_bytes: int) -> None:
    """Write a pattern slice by slice, each as soon as it may be written."""

    def one(start: int) -> None:
        size = min(slice_bytes, nbytes - start)
        loan.wait(start, size)
        bytes_at(loan.address + start, size).view(np.uint64)[:] = start + 1

    with ThreadPoolExecutor(FILLERS) as pool:
        list(pool.map(one, range(0, nbytes, slice_bytes)))


def copied(runtime: Any, region: Region, slice_bytes: int) -> tuple[float, int]:
    """(GB/s to the device, slices that differ afterwards); of spans that are page-locked."""
    stream = runtime.create_stream(0)
    there = runtime.alloc(0, slice_bytes)
    back = np.zeros(slice_bytes, np.uint8)
    took, moved, wrong = 0.0, 0, 0
    for span in region.spans:
        for at in range(0, span.nbytes if span.pinned else 0, slice_bytes):
            size = min(slice_bytes, span.nbytes - at)
            began = time.perf_counter()
            runtime.copy(there, span.address + at, size, stream)
            runtime.synchronize(stream)
            took += time.perf_counter() - began
            moved += size
            runtime.copy(back.ctypes.data, there, size, stream)
            runtime.synchronize(stream)
            wrong += not np.array_equal(back[:size], bytes_at(span.address + at, size))
    runtime.free(0, there)
    runtime.destroy_stream(stream)
    return (moved / took / 1e9 if took else 0.0), wrong


def across(runtime: Any, region: Region) -> str:
    """What a copy over the border of two slices does."""
    first = region.spans[0]
    stream = runtime.create_stream(0)
    there = runtime.alloc(0, 8192)
    try:
        runtime.copy(there, first.address + first.nbytes - 4096, 8192, stream)
        runtime.synchronize(stream)
        return "was made"
    except DeviceError as error:
        runtime.take_error()
        return f"was refused: {error.why}"
    finally:
        runtime.free(0, there)
        runtime.destroy_stream(stream)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", default="strata_cuda.runtime:CudaRuntime")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--slice-mib", type=int, default=352)
    given = parser.parse_args()
    module, _, name = given.runtime.partition(":")
    runtime = getattr(importlib.import_module(module), name)()
    runtime.open_context(0)
    slice_bytes = given.slice_mib << 20
    nbytes = int(given.gib * 2**30) // slice_bytes * slice_bytes
    ways = {**WAYS, "path 2, half": PinSettings(complement=nbytes // 2 + 12345)}
    ways["pinned prefix"] = PinSettings(partial=True, partial_most=nbytes // 2)
    machine, ledger, failed = read_machine(), Ledger(), 0
    for way, settings in ways.items():
        host = Host(runtime=runtime, ledger=ledger, system=system_memory())
        allocator = PinnedAllocator(host, settings, print, threads=populate_threads(machine))
        began = time.perf_counter()
        loan = allocator.prepare(nbytes, range(0, nbytes, slice_bytes), COMPLEMENT)
        fill(loan, nbytes, slice_bytes)
        region = loan.region()
        ready = time.perf_counter() - began
        rate, wrong = copied(runtime, region, slice_bytes)
        pinned = [span for span in region.spans if span.pinned]
        aliases = sum(span.alias is not None for span in pinned)
        border = across(runtime, region) if len(pinned) > 1 else "-"
        began = time.perf_counter()
        allocator.close()
        gone = time.perf_counter() - began
        print(
            f"{way}: {region.path}, {sum(s.nbytes for s in pinned) / 2**30:.2f} of "
            f"{nbytes / 2**30:.2f} GiB in {len(pinned)} pieces, {aliases} with an address there; "
            f"filled and ready at {nbytes / ready / 2**30:.2f} GiB/s, copied at {rate:.1f} GB/s, "
            f"{wrong} differ; a copy over a border {border}; given back in {gone:.2f} s"
        )
        failed += wrong + len(ledger.outstanding())
    began = time.perf_counter()
    probe = probe_pins(runtime)
    print(f"probe: {probe} in {time.perf_counter() - began:.2f} s")
    runtime.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
