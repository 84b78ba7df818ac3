"""The suite for runtimes on the simulator, wherever its devices find host memory."""

from __future__ import annotations

import pytest

from strata_core.runtime import Launch
from strata_core.testing.conformance.runtime import RuntimeSuite
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.sample import add, add_launch, add_pointers

MIB = 1 << 20


class SimSuite(RuntimeSuite):
    hardware = SimHardware()

    def make(self) -> SimRuntime:
        return SimRuntime(self.hardware, host_kernels={"add": add}, pointers=add_pointers)

    def add(self, x: int, y: int, count: int) -> Launch:
        return add_launch(x, y, count)

    @pytest.fixture
    def runtime(self):
        made = self.make()
        made.open_context(0)
        yield made
        made.close()
        across = "lie in two registrations"
        assert [line for line in made.breaches if across not in line] == []


class TestPlain(SimSuite):
    pass


class TestTwoDevicesWithABudget(SimSuite):
    hardware = SimHardware(vram=(256 * MIB, 128 * MIB), pin_budget=200 * MIB)


class TestAliasesApart(SimSuite):
    hardware = SimHardware(vram=(256 * MIB,), aliases="apart")


class TestNoAliases(SimSuite):
    hardware = SimHardware(vram=(256 * MIB,), aliases="none")
