"""How fast path 2 makes memory ready, against path 1, in bytes a second of real memory work.

The work is the system's: pages are brought in and locked. A stand-in for a driver does both in one
call and one thread for an allocation (as drivers do, docs/experiments.md), and locks what exists
when it registers. Path 2 runs through the allocator as it is: populated by several threads,
registered slice by slice.

Run: python tests/memory/measure_paths.py [--gib N] [--slice-mib N] [--repeat N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from strata_core.errors import Refused
from strata_core.machine import read_machine
from strata_core.memory.holding import Host
from strata_core.memory.ledger import Ledger
from strata_core.memory.pinned import PinnedAllocator
from strata_core.memory.platform import Reserved, populate_threads
from strata_core.memory.platform.posix import PosixMemory
from strata_core.memory.rules import COMPLEMENT, PinSettings


class Locking:
    """The verbs that the chain needs; page-locking is mlock."""

    def __init__(self, system: PosixMemory) -> None:
        self._system = system
        self._held: dict[int, Reserved] = {}
        self._registered: dict[int, int] = {}

    def host_alloc(self, nbytes: int) -> int:
        reserved = self._system.reserve(nbytes)
        self._lock(reserved.address, nbytes)
        self._held[reserved.address] = reserved
        return reserved.address

    def host_free(self, address: int) -> None:
        self._system.free(self._held.pop(address))

    def register(self, address: int, nbytes: int) -> None:
        self._lock(address, nbytes)
        self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._system.unlock(address, self._registered.pop(address))

    def alias(self, address: int, device: int) -> int:
        del device
        return address

    def take_error(self) -> None:
        return None

    def _lock(self, address: int, nbytes: int) -> None:
        why = self._system.lock(address, nbytes)
        if why is not None:
            raise Refused("page-locking failed", why, "raise the limit (ulimit -l)")


def seconds(
    settings: PinSettings, nbytes: int, cuts: range, threads: int
) -> tuple[str, float, float]:
    """(path, seconds until the region is ready, processor seconds) of one preparation."""
    system = PosixMemory()
    runtime: Any = Locking(system)
    host = Host(runtime=runtime, ledger=Ledger(), system=system)
    allocator = PinnedAllocator(host, settings, print, threads=threads)
    began, busy = time.perf_counter(), time.process_time()
    region = allocator.reserve(nbytes, cuts, COMPLEMENT)
    took, worked = time.perf_counter() - began, time.process_time() - busy
    allocator.close()
    return region.path, took, worked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--slice-mib", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=populate_threads(read_machine()))
    given = parser.parse_args()
    nbytes = int(given.gib * 2**30)
    cuts = range(0, nbytes, given.slice_mib << 20)
    ways = {
        "pinned": PinSettings(complement="all"),
        "sliced": PinSettings(complement="all", refuse_one=True),
    }
    rates: dict[str, list[float]] = {path: [] for path in ways}
    work: dict[str, list[float]] = {path: [] for path in ways}
    for _ in range(given.repeat + 1):
        for path, settings in ways.items():
            had, took, worked = seconds(settings, nbytes, cuts, given.threads)
            if had != path:
                raise SystemExit(f"path {path} was not taken: {had}")
            rates[path].append(nbytes / took / 1e9)
            work[path].append(worked / nbytes * 1e9)
    for path, found in rates.items():  # the first round pays for what the machine does once
        print(
            f"{path}: {statistics.median(found[1:]):.2f} GB/s, {min(found[1:]):.2f} to "
            f"{max(found[1:]):.2f}; {statistics.median(work[path][1:]):.2f} processor s/GB"
        )
    for word, best in (("medians", statistics.median), ("best", max)):
        ratio = best(rates["sliced"][1:]) / best(rates["pinned"][1:])
        print(f"path 2 / path 1, {word}: {ratio:.2f}")
    print(f"{given.threads} threads populate, {len(cuts)} slices, {given.repeat} rounds")


if __name__ == "__main__":
    main()
