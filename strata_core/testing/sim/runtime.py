"""The simulated accelerator: every verb of `strata_core.runtime`, on host memory.

It keeps the rules of real accelerators strictly: what a real driver lets pass and then corrupts is
an error here, at once, and is listed in `breaches`. What it did is in `report()`, what was not
given back in `leaks()`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from strata_core.errors import DeviceError, UsageError
from strata_core.testing.sim.failure import ALREADY_MAPPED, ILLEGAL_ADDRESS, broken
from strata_core.testing.sim.hardware import GIB, SimFaults, SimHardware
from strata_core.testing.sim.work_verbs import HostKernel, Pointers, WorkVerbs

_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class SimRuntime(WorkVerbs):
    """An accelerator, or several, made of host memory. Any thread may call it; one at a time works.

    `host_kernels` are called as kernels, by name, on the argument block of the launch; they find
    memory with `reach`, and tell what they moved over the link with `note_link`. `pointers` names
    the addresses in a launch's argument block, so that stale ones are found before the kernel runs.
    Device memory is host memory: after a `synchronize` a test may read it where it is.
    """

    def __init__(
        self,
        hardware: SimHardware | None = None,
        *,
        host_kernels: Mapping[str, HostKernel] | None = None,
        faults: SimFaults | None = None,
        pointers: Pointers | None = None,
    ) -> None:
        super().__init__(
            hardware or SimHardware(), faults or SimFaults(), host_kernels or {}, pointers
        )
        self._launcher = _LAUNCH(self._launch_from_code)
        self._left: list[str] = []

    @property
    def graph_launcher(self) -> int:
        """A C function that any thread may call; what fails in it, the next verb raises."""
        return ctypes.cast(self._launcher, ctypes.c_void_p).value or 0

    @property
    def kernel_log(self) -> list[str]:
        """What the operating system's kernel logged: one line for each refusal to pin."""
        return self.places.kernel_log

    def report(self) -> dict[str, Any]:
        """What was done so far, as plain data: bytes, launches and waits, never times."""
        with self.lock:
            return self.account.as_dict(self.label)

    def calls(self) -> dict[str, int]:
        """How often each verb was called, those that failed included."""
        with self.lock:
            return dict(self._calls)

    def leaks(self) -> list[str]:
        """What is not given back now; after `close`, what was not when it began."""
        with self.lock:
            return list(self._left) if self.closed else self._held()

    def close(self) -> None:
        """Free everything; DeviceError at the end where memory was misused unnoticed till now."""
        with self.lock:
            if self.closed:
                return
            error: DeviceError | None = None
            try:
                self.enter("close", heed_error=False)
            except DeviceError as injected:
                error = injected
            self._left = self._held()
            # what a lost device could not give back is nobody's fault
            found = [] if self.lost else self._misuse()
            self._clear()
        for one in found:
            self.note_breach(one)
        if error or found:
            raise error or found[0]

    def _misuse(self) -> list[DeviceError]:
        remedy = "find who does it with check_idle, reach and note_unmapped"
        gone = [
            broken(
                f"close: {pin.nbytes} bytes at {pin.address:#x} are registered, but not mapped",
                ALREADY_MAPPED,
                "memory stays mapped until it is unregistered",
                remedy,
            )
            for pin in self.places.unmapped_pins()
        ]
        return gone + [
            broken(f"close: {line}", ILLEGAL_ADDRESS, "work keeps within its memory", remedy)
            for line in self.places.overwritten()
        ]

    def _held(self) -> list[str]:
        queues = self.queues
        return (
            self.places.left()
            + [f"stream {s.name}" for s in queues.streams.values()]
            + [f"unfinished {w.what} on stream {w.stream.name}" for w in queues.queued()]
            + [f"event of device {event.device}" for event in queues.events.values()]
            + [f"graph of device {graph.device}" for graph in queues.graphs.values()]
        )

    def _clear(self) -> None:
        for group in (self.queues.streams, self.queues.events, self.queues.graphs):
            group.clear()
        self.places.clear()
        self.account.pin("contexts", -len(self.contexts) * self.hardware.context_pins)
        self.contexts.clear()
        self.closed = True

    def _launch_from_code(self, graph: int | None, stream: int | None) -> int:
        """`launch_graph` for compiled code: 0, or 1 and an error for the next verb."""
        with self.lock:
            try:
                self.enter("graph_launcher")
                self.account.launcher_calls += 1
                with self.recorded():
                    self.run_graph(graph or 0, stream or 0, "graph_launcher")
            except BaseException as error:  # noqa: BLE001  nothing can be raised into compiled code
                self.keep_for_next(error)
                return 1
            return 0


def sim_hardware(options: Mapping[str, Any], **hardware: Any) -> SimHardware:
    """The machine of the options `sim_vram`, `sim_pin_budget` and `sim_devices`.

    The first two are GiB (8 and no limit, where they are None or not there), the third counts
    devices (1), all of the same size. `hardware` are further fields of `SimHardware`. Raises
    UsageError for a size that no machine has.
    """
    vram, pins = options.get("sim_vram"), options.get("sim_pin_budget")
    devices = options.get("sim_devices")
    count = 1 if devices is None else int(devices)
    each = 8 * GIB if vram is None else int(float(vram) * GIB)
    for flag, value in (("--sim-vram", each), ("--sim-devices", count)):
        if value < 1:
            raise UsageError(
                f"{flag} makes no machine", "a simulated device has memory", "give more than 0"
            )
    if pins is not None and pins < 0:
        raise UsageError(
            "--sim-pin-budget is negative", "a budget is 0 GiB or more", "give 0 or more"
        )
    budget = None if pins is None else int(float(pins) * GIB)
    return SimHardware(vram=(each,) * count, pin_budget=budget, **hardware)


def sim_runtime(
    options: Mapping[str, Any],
    *,
    host_kernels: Mapping[str, HostKernel] | None = None,
    faults: SimFaults | None = None,
    pointers: Pointers | None = None,
    **hardware: Any,
) -> SimRuntime:
    """The simulated accelerator of the machine that `sim_hardware` makes of the options."""
    made = sim_hardware(options, **hardware)
    return SimRuntime(made, host_kernels=host_kernels, faults=faults, pointers=pointers)
