"""Measuring the lanes at start, in well under a tenth of a second: what the link moves, what the
CPU computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from attrs import frozen

from strata_core.errors import DeviceError, Refused
from strata_core.interfaces import BlobLayout
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.host_lane import HostLane
from strata_core.kernels.device.split import Lane
from strata_core.memory.held import Held
from strata_core.runtime import Runtime, StatesLink

REPEATS = 4
"""Layers that are measured; the best time counts."""

LIMIT = 0.04
"""Seconds after which no further layer of a lane is measured."""

KERNEL_SHARE = 0.9
"""What kernels read through an alias of what a copy engine moves (docs/experiments.md, 3)."""

KERNEL_START = 8e-6
"""Seconds until a kernel has the first bytes through an alias (docs/experiments.md, 3)."""


@frozen
class Sample:
    """Experts of one layer that both lanes can compute, at most as many as a token picks."""

    layer: int
    layout: BlobLayout
    experts: tuple[int, ...]


def samples(cells: Cells, host: HostLane, top_k: int) -> list[Sample]:
    """Experts with an alias and an address, and in no slot: of REPEATS layers, the fullest ones."""
    found = []
    for layer, table in cells.layers.items():
        known = host.experts[layer]
        both = (table["alias"][:, 0] != 0) & (known.table[:, 0] != 0) & (table["slot"][:, 0] == 0)
        experts = tuple(both.nonzero()[0][:top_k].tolist())
        if experts:
            found.append(Sample(layer, known.layout, experts))
    return sorted(found, key=lambda each: -len(each.experts))[:REPEATS]


def cpu_lane(host: HostLane, pool: Pool, over: Sequence[Sample]) -> Lane:
    """The CPU's lane, by its own phases."""
    host.try_out(pool, over[0].layer, over[0].experts[:1])

    def seconds(sample: Sample, count: int) -> float:
        return host.try_out(pool, sample.layer, sample.experts[:count])

    return _fit(over, seconds)


def link_lane(
    runtime: Runtime, held: Held, device: int, stream: int, host: HostLane, over: Sequence[Sample]
) -> Lane | None:
    """The link's lane, by copies of experts to a device; None where there is no room for one.

    A runtime that states its link is believed.
    """
    if isinstance(runtime, StatesLink):
        return Lane(KERNEL_START, runtime.link_rate(device))
    try:
        target = held.device(device, max(s.layout.nbytes for s in over), "measuring the link")
    except Refused:
        return None

    def seconds(sample: Sample, count: int) -> float:
        began = time.perf_counter()
        for index in sample.experts[:count]:
            places = host.experts[sample.layer].table[index].tolist()
            for part, place in zip(sample.layout.parts, places, strict=True):
                runtime.copy(target, place, part.nbytes, stream)
        runtime.synchronize(stream)
        return time.perf_counter() - began

    try:
        seconds(over[0], 1)
        found = _fit(over, seconds)
    except DeviceError:
        runtime.take_error()
        return None
    finally:
        with suppress(DeviceError):
            held.release(target)
    return Lane(KERNEL_START, found.rate * KERNEL_SHARE)


def _fit(over: Sequence[Sample], seconds: Callable[[Sample, int], float]) -> Lane:
    """A lane from the best times of one expert and of all of a sample."""
    one = many = float("inf")
    most = len(over[0].experts)
    began = time.perf_counter()
    for sample in over:
        one = min(one, seconds(sample, 1))
        if len(sample.experts) == most:
            many = min(many, seconds(sample, most))
        if time.perf_counter() - began > LIMIT:
            break
    nbytes = over[0].layout.nbytes
    rate = most * nbytes / max(many, 1e-9)
    if most > 1 and many > one:
        rate = (most - 1) * nbytes / (many - one)
    return Lane(max(0.0, one - nbytes / rate), rate)
