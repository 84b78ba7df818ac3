"""A host kernel as an example and for tests of verbs: x += y over float32."""

from __future__ import annotations

import struct

import numpy as np

from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim.runtime import SimRuntime

ADD = KernelKey("add")


def add(runtime: SimRuntime, device: int, launch: Launch) -> None:
    """Add `count` float32 at y to those at x; the block is x, y (addresses) and count (int64)."""
    x, y, count = struct.unpack("<QQq", launch.args)
    source = runtime.reach(device, y, 4 * count).view(np.float32)
    runtime.reach(device, x, 4 * count, write=True).view(np.float32)[:] += source


def add_launch(x: int, y: int, count: int) -> Launch:
    """The launch of `add`."""
    return Launch(ADD, (1, 1, 1), (32, 1, 1), 0, struct.pack("<QQq", x, y, count))


def add_pointers(launch: Launch) -> tuple[int, ...]:
    """The addresses in a block of `add`."""
    return struct.unpack("<QQ", launch.args[:16])
