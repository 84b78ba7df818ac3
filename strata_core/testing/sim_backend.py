"""The backend record `sim`: the device backend over the simulated accelerator.

Its devices, their memory and what their driver pins come from --sim-devices, --sim-vram and
--sim-pin-budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata_core.interfaces import Backend, BackendContext
from strata_core.runtime import Device


def devices(options: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices that a simulated accelerator of these options has."""
    from strata_core.testing.sim.options import sim_runtime

    runtime = sim_runtime(options)
    try:
        return tuple(runtime.devices())
    finally:
        runtime.close()


def build(context: BackendContext) -> Backend:
    """The backend of the record `sim`."""
    from strata_core.kernels.device.backend import DeviceBackend
    from strata_core.testing.sim.options import sim_runtime

    return DeviceBackend(sim_runtime(context.options), context)
