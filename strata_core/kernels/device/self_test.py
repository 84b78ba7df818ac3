"""The self-test of a device: the very kernels that a model's types need, on golden rows.

It comes before anything lies on the device, so that there is room for it, and a device that
computes nonsense is known before gigabytes are on it. Its memory is claimed and given back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

from strata_core.cache.staging import Staging
from strata_core.errors import Degradation
from strata_core.interfaces import BlobLayout, Progress
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.self_test import check_cpu_lane
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.dense import Stored
from strata_core.kernels.device.exchange import Exchange
from strata_core.kernels.device.fuse import fuse
from strata_core.kernels.device.golden import TESTED, GoldenWork
from strata_core.kernels.device.golden_image import Bytes, Image
from strata_core.kernels.device.layout import HIT, LINK
from strata_core.kernels.device.lower import Lowering
from strata_core.kernels.device.prompt_lower import multiplying_kernels
from strata_core.kernels.device.regions import ALIGNMENT
from strata_core.kernels.device.segments import Mode, Places
from strata_core.kernels.device.workspace import Model, main_regions
from strata_core.kernels.self_test import Computed, LaneCheck, check_lane
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held
from strata_core.runtime import Device, KernelKey, Launch

_log = logging.getLogger("strata.device")

AT_ONCE = 32
"""Kernels whose golden rows are in one image, which a buffer for filling has room for."""

REMEDY = (
    "empty the folder of compiled kernels that `strata doctor` names, or update the device's "
    "driver; --backend cpu computes without the device; `strata verify` shows what differs"
)


@define(eq=False)
class DeviceTests:
    """The self-tests of the devices that one model is placed on. Used by one thread.

    `main` computes the model, all others are helpers; `exchange` has its place before the first
    test.
    """

    held: Held
    main: int
    model: Model
    exchange: Exchange
    stored: Sequence[Stored]
    progress: Progress
    degrade: Callable[[Degradation], None]
    exact: bool = field(default=True, init=False)
    """Whether every lane that is used gave every bit."""
    _linked: dict[int, bool] = field(factory=dict, init=False)

    def run(self, device: int, staging: Staging, *, link: bool) -> bool:
        """Have a device compute golden rows, once; whether it may read experts over the link.

        `link`: that is tested too, where the device can. What is wrong is told. Raises
        CheckpointError where the kernels cannot compute the model, Refused, DeviceError; then the
        memory is given back with what else is held.
        """
        if device not in self._linked:
            self.progress.start(f"testing the kernels of {self._label(device)}", 0)
            try:
                self._linked[device] = self._run(device, staging, link=link)
            finally:
                self.progress.done()
        return self._linked[device]

    def _label(self, device: int) -> str:
        return f"{self.held.runtime.label}{device}"

    def _run(self, device: int, staging: Staging, *, link: bool) -> bool:
        runtime, label = self.held.runtime, self._label(device)
        keys = golden_keys(self._kernels(device))
        runtime.load(device, keys)
        began = time.perf_counter()
        own: list[Computed] = []
        far: list[Computed] = []
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            image, came = compute(self.held, device, some, staging, link=link)
            own += image.computed(came, HIT)
            far += image.computed(came, LINK)
        took = (time.perf_counter() - began) * 1e3
        _log.debug("%s: self-test of %d kernels in %.1f ms", label, len(keys), took)
        check, linked = check_lane(label, own), check_lane(f"{label} over the link", far)
        self.exact &= check.exact
        for item in check.degradations(REMEDY):
            self.degrade(item)
        if not linked.exact:
            self.degrade(_without_link(linked))
        return linked.exact

    def _kernels(self, device: int) -> set[KernelKey]:
        if device != self.main:
            return helper_kernels(self.model)
        facts = self.held.runtime.devices()[device]
        return main_kernels(self.model, self.exchange, self.stored, facts)


def compute(
    held: Held, device: int, keys: Sequence[KernelKey], staging: Staging, *, link: bool
) -> tuple[Image, Bytes]:
    """The image of up to AT_ONCE loaded kernels' work, and the bytes that came back of it.

    `link`: experts are read over the link too, where the device can. Raises Refused, DeviceError;
    then the device's memory is still `held`'s.
    """
    runtime, room = held.runtime, held.runtime.devices()[device].shared
    staging.drain()  # its buffers are the host's copies of the image
    source, back = staging.addresses[:2]
    seen = (runtime.alias(source, device) or 0) if link else 0
    plan = GoldenWork(ALIGNMENT, seen, room)
    plan.add(keys)
    nbytes = plan.image.nbytes
    assert nbytes <= staging.nbytes, "an image fits into a buffer"
    base = held.device(device, nbytes, "the self-test of its kernels")
    work = GoldenWork(base, seen, room)
    work.add(keys)
    work.image.write(bytes_at(source, nbytes))
    stream = staging.stream(device)
    runtime.copy(base, source, nbytes, stream)
    for launch in work.launches:
        runtime.launch(launch, stream)
    runtime.copy(back, base, nbytes, stream)
    runtime.synchronize(stream)
    held.release(base)
    return work.image, bytes_at(back, nbytes).copy()


def _without_link(check: LaneCheck) -> Degradation:
    return Degradation(
        what=f"the lane {check.lane} is left out",
        why=f"it does not compute the golden rows of its self-test: {check.why}",
        cost="the CPU computes every expert that no device holds",
        remedy=REMEDY,
    )


def main_kernels(
    model: Model, exchange: Exchange, stored: Iterable[Stored], facts: Device
) -> set[KernelKey]:
    """The kernels of a model's rounds and prompts on the first device; nothing need be placed.

    `exchange` has its place. Raises CheckpointError for a model that the kernels cannot compute.
    """
    regions = main_regions(model, exchange)
    regions.base = 0
    weights = {one.weight: one.at(ALIGNMENT * n) for n, one in enumerate(stored, 1)}
    places = Places(regions, exchange, exchange.address, weights, facts.shared)
    segments = map(fuse, Lowering(model, places, Mode(model.tokens, 1, 1), frozenset()).lower())
    launches = [i for s in segments for i in s.items if isinstance(i, Launch)]
    kernels = {launch.kernel for launch in launches}
    return kernels | multiplying_kernels(model, matrix=facts.matrix)


def helper_kernels(model: Model) -> set[KernelKey]:
    """The kernels of a helper's rounds that multiply weights."""
    found = set()
    for layer in model.routed:
        types = _types(model.layouts[layer])
        found |= {KernelKey("gate_up", types), KernelKey("down", types[2:])}
    return found


def check_host_lane(library: Library, pool: Pool, model: Model) -> LaneCheck:
    """The CPU's lane of rounds: those of its compiled steps that compute the model's experts."""
    every = [_types(model.layouts[layer]) for layer in model.routed]
    wanted = {("gate_up", types) for types in every} | {("down", types[2:]) for types in every}
    steps = [
        step
        for step in library.steps
        if (step.name, tuple(p for p in step.parameters if p != "tiles")) in wanted
    ]
    return check_cpu_lane(library, pool, steps)


def _types(layout: BlobLayout) -> tuple[str, str, str]:
    gate, up, down = (part.type for part in layout.parts)
    return gate, up, down


def golden_keys(kernels: Iterable[KernelKey]) -> list[KernelKey]:
    """Those that golden rows can test, each once, and the kernel that makes their inputs."""
    found = {key for key in kernels if key.name in TESTED}
    if any(p in UNPACK for key in found for p in key.parameters):
        found.add(KernelKey("quantise"))
    return sorted(found, key=repr)
