"""The backend record `sim`: the device backend over the simulated accelerator.

Its devices, their memory and what their driver pins come from --sim-devices, --sim-vram and
--sim-pin-budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata_core.errors import UsageError
from strata_core.interfaces import Backend, BackendContext
from strata_core.runtime import Device

_BOUND = 60.0
"""Seconds that a simulated device waits for the host, with which it shares the cores."""


def devices(options: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices that a simulated accelerator of these options has."""
    from strata_core.testing.sim import sim_runtime

    runtime = sim_runtime(options)
    try:
        return tuple(runtime.devices())
    finally:
        runtime.close()


def pins(options: Mapping[str, Any]) -> int | None:
    """Bytes that its driver page-locks beside the contexts of all devices; None: no limit.

    STRATA_PIN_LIMIT_GIB, where it is given, is another limit. Raises UsageError where the contexts
    alone take more.
    """
    from strata_core.testing.sim import sim_runtime
    from strata_core.testing.sim.failure import size

    runtime = sim_runtime(options)
    try:
        hardware = runtime.hardware
    finally:
        runtime.close()
    given = options.get("pin_limit_gib")
    limits = [] if given is None else [int(given * 2**30)]
    if hardware.pin_budget is not None:
        contexts = hardware.context_pins * len(hardware.vram)
        if hardware.pin_budget < contexts:
            raise UsageError(
                f"--sim-pin-budget {options['sim_pin_budget']:g} is too little for the contexts of "
                f"{len(hardware.vram)} simulated device(s)",
                f"the context of each pins {size(hardware.context_pins)}: {size(contexts)} in all, "
                f"and the budget is {size(hardware.pin_budget)}",
                f"give at least {contexts / 2**30:.4g} (GiB) and what is to be page-locked "
                "besides, or leave it out",
            )
        limits.append(hardware.pin_budget - contexts)
    return min(limits, default=None)


def build(context: BackendContext, **machine: Any) -> Backend:
    """The backend of the record `sim`; tests give `machine` what `sim_runtime` takes besides."""
    from strata_core.kernels.cpu.backend import compiler_of
    from strata_core.kernels.cpu.library import Library
    from strata_core.kernels.device.backend import DeviceBackend
    from strata_core.testing.sim import sim_runtime
    from strata_core.testing.sim.args import pointers
    from strata_core.testing.sim.host_kernels import HostKernels

    library = Library(compiler_of(context))
    kernels = HostKernels(library).mapping()
    runtime = sim_runtime(context.options, host_kernels=kernels, pointers=pointers, **machine)
    try:
        return DeviceBackend(runtime, context, library=library, bound=_BOUND)
    except BaseException:
        runtime.close()
        raise
