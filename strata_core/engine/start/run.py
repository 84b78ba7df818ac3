"""Running a start on devices, phase by phase. What a phase took is given back if a later one fails.

The parts own what they take: closing the source, the allocator and the backend, in this order,
returns all of it, whatever was done by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import define, field, frozen

from strata_core.engine.ending import closing
from strata_core.engine.start.diagnosis import Diagnosis, Symptom, diagnose, forget, remember
from strata_core.engine.start.order import DOING, Phase, Step, start_order
from strata_core.engine.start.staged import FindsLimit, Staged, StagedBackend
from strata_core.errors import DeviceError, Refused
from strata_core.interfaces import Allocator, Executor, Expert, Source, StartPolicy
from strata_core.machine import Machine
from strata_core.memory.ledger import PINNED
from strata_core.runtime import DeviceMemory

_log = logging.getLogger("strata.start")


@frozen(kw_only=True)
class StartRequest:
    """What a start works with.

    `early` is STRATA_EARLY_REMOTE_CONTEXTS, `memory_folder` where refusals are remembered.
    `prepare` begins the placement, `make_source` builds the source for the experts that devices
    hold by then, `bind` makes the executor.
    """

    machine: Machine
    backend: StagedBackend
    allocator: Allocator
    policy: StartPolicy
    early: bool | None
    memory_folder: Path | None
    prepare: Callable[[], Staged]
    make_source: Callable[[frozenset[Expert]], Source]
    bind: Callable[[Source], Executor]


@define(eq=False)
class DeviceStart:
    """One start. `parts` is where what was built is put, to be closed in reverse order."""

    request: StartRequest
    parts: ExitStack
    _opened: list[int] = field(factory=list)
    _settled: bool = False
    _bulk: bool = False
    _staged: Staged | None = None
    _source: Source | None = None
    _executor: Executor | None = None

    def run(self) -> Executor:
        """Do every step. Raises StrataError, which names the phase where a device refused."""
        devices = self.request.backend.options.wanted_devices
        steps = start_order(self.request.policy, self.request.early, len(devices) - 1)
        for step in steps:
            self._checked(step, devices)
        forget(self.request.memory_folder)
        assert self._executor is not None, "every order ends with bind"
        return self._executor

    def _checked(self, step: Step, devices: Sequence[int]) -> None:
        try:
            if step.phase != "contexts":
                self._settle()
            _STEPS[step.phase](self, [devices[number] for number in step.devices])
        except DeviceError as error:
            concerned = [devices[number] for number in step.devices]
            raise self._told(step.phase, concerned, error) from error

    # the phases; `devices` are indices of the runtime

    def _contexts(self, devices: Sequence[int]) -> None:
        runtime = self.request.backend.runtime
        for device in devices:
            if device in self._opened:
                continue
            runtime.open_context(device)
            self._opened.append(device)
            when = "" if self._bulk else " before expert arena registration"
            free = runtime.memory(device).free / 2**30
            _log.info("%s%d context ready, %.2f GiB free%s", runtime.label, device, free, when)

    def _settle(self) -> None:
        """Once, after the first contexts: the allocator finds its limit, the placement begins."""
        if self._settled:
            return
        self._settled = True
        if isinstance(self.request.allocator, FindsLimit):
            self.request.allocator.contexts_ready(tuple(self._opened))
        self._staged = self.request.prepare()

    def _small_pins(self, _devices: Sequence[int]) -> None:
        self._placement.take_small_pins()

    def _self_test(self, devices: Sequence[int]) -> None:
        self._placement.test_lanes(devices)

    def _dense(self, _devices: Sequence[int]) -> None:
        self._placement.place_dense()

    def _embedding(self, _devices: Sequence[int]) -> None:
        self._placement.place_embedding(self.request.policy.embedding)

    def _slots(self, devices: Sequence[int]) -> None:
        self._placement.make_cache()
        if len(devices) > 1:
            self._placement.make_helpers(devices[1:])

    def _get_bulk(self, _devices: Sequence[int]) -> None:
        self._bulk = True
        held = self._staged.resident if self._staged is not None else frozenset()
        self._source = self.request.make_source(held)
        self.parts.push(closing(self._source.close))
        # copies out of the source's memory may be under way until the placement is closed
        self.parts.push(closing(self._placement.close))

    def _cache(self, _devices: Sequence[int]) -> None:
        self._placement.fill_cache(self._needed_source)

    def _helpers(self, _devices: Sequence[int]) -> None:
        self._placement.fill_helpers(self._needed_source)

    def _bind(self, _devices: Sequence[int]) -> None:
        self._executor = self.request.bind(self._needed_source)
        self.parts.push(closing(self._executor.close))

    @property
    def _placement(self) -> Staged:
        assert self._staged is not None, "contexts come first in every order"
        return self._staged

    @property
    def _needed_source(self) -> Source:
        assert self._source is not None, "the bulk comes before what is filled from it"
        return self._source

    # failures

    def _told(self, phase: Phase, devices: Sequence[int], error: DeviceError) -> DeviceError:
        """The error of a phase: what was being done, the cause, and what to do about it."""
        runtime = self.request.backend.runtime
        runtime.take_error()
        labels = ", ".join(f"{runtime.label}{device}" for device in devices)
        doing = DOING[phase].format(devices=labels)
        if not isinstance(error, Refused):
            return DeviceError(f"{doing} failed: {error.what}", error.why, error.remedy)
        found = self._diagnosis(doing, devices, error)
        why, remedy = error.why, error.remedy
        if found is not None:
            why = f"{found.what}: {found.why}; the driver says: {error.why}"
            remedy = found.remedy
        return Refused(f"{doing} was refused: {error.what}", why, remedy)

    def _diagnosis(self, doing: str, devices: Sequence[int], error: Refused) -> Diagnosis | None:
        backend, machine = self.request.backend, self.request.machine
        last = devices[-1]
        memory = self._memory(last)
        symptom = Symptom(
            doing=doing,
            error=error.why.splitlines()[0] if error.why else error.what,
            device=f"{backend.runtime.label}{last}",
            vram_free=memory.free,
            vram_total=memory.total,
            ram_available=machine.memory_available,
            pinned=backend.ledger.used(PINNED),
        )
        remember(self.request.memory_folder, symptom)
        return diagnose(machine, symptom)

    def _memory(self, device: int) -> DeviceMemory:
        """What is free on a device; zeros where it has no context."""
        if device not in self._opened:
            return DeviceMemory(0, 0)
        try:
            return self.request.backend.runtime.memory(device)
        except DeviceError:
            self.request.backend.runtime.take_error()
            return DeviceMemory(0, 0)


_STEPS: dict[Phase, Callable[[DeviceStart, Sequence[int]], None]] = {
    "contexts": DeviceStart._contexts,  # noqa: SLF001 - the class's own table of phases
    "small pins": DeviceStart._small_pins,  # noqa: SLF001
    "self-test": DeviceStart._self_test,  # noqa: SLF001
    "dense weights": DeviceStart._dense,  # noqa: SLF001
    "embedding": DeviceStart._embedding,  # noqa: SLF001
    "slots": DeviceStart._slots,  # noqa: SLF001
    "bulk": DeviceStart._get_bulk,  # noqa: SLF001
    "expert cache": DeviceStart._cache,  # noqa: SLF001
    "helper caches": DeviceStart._helpers,  # noqa: SLF001
    "bind": DeviceStart._bind,  # noqa: SLF001
}
