"""Runtimes that are closed after the test, with a kernel that works and some that do not."""

from __future__ import annotations

import pytest

from strata_core.runtime import Launch
from strata_core.testing.sim import SimFaults, SimHardware, SimRuntime
from strata_core.testing.sim.sample import add, add_pointers

MIB = 1 << 20


def explode(runtime: SimRuntime, device: int, launch: Launch) -> None:
    raise ZeroDivisionError("on purpose")


def interrupt(runtime: SimRuntime, device: int, launch: Launch) -> None:
    raise KeyboardInterrupt


KERNELS = {"add": add, "explode": explode, "interrupt": interrupt}


def pointers(launch: Launch) -> tuple[int, ...]:
    return add_pointers(launch) if launch.kernel.name == "add" else ()


@pytest.fixture
def make():
    """make(faults, **hardware): a runtime with device 0 open, closed after the test."""
    made: list[SimRuntime] = []

    def runtime(faults: SimFaults | None = None, opened: int = 1, **hardware: object) -> SimRuntime:
        facts = {"vram": (16 * MIB,), "context_pins": MIB, **hardware}
        sim = SimRuntime(
            SimHardware(**facts), host_kernels=KERNELS, faults=faults, pointers=pointers
        )
        made.append(sim)
        for device in range(opened):
            sim.open_context(device)
        return sim

    yield runtime
    for sim in made:
        sim.close()


@pytest.fixture
def sim(make) -> SimRuntime:
    return make()


@pytest.fixture
def stream(sim: SimRuntime) -> int:
    return sim.create_stream(0)
