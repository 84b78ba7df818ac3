"""The simulated accelerator: a runtime on host memory that keeps the rules of real ones."""

from strata_core.testing.sim.hardware import VERBS, SimFaults, SimHardware
from strata_core.testing.sim.runtime import SimRuntime, sim_hardware, sim_runtime
from strata_core.testing.sim.work_verbs import HostKernel, Pointers

__all__ = [
    "VERBS",
    "HostKernel",
    "Pointers",
    "SimFaults",
    "SimHardware",
    "SimRuntime",
    "sim_hardware",
    "sim_runtime",
]
