"""The records that this distribution offers. Importing this opens no library and no device."""

from __future__ import annotations

from attrs import evolve

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    AllocatorRecord,
    Backend,
    BackendContext,
    BackendRecord,
    Capabilities,
)
from strata_hip.probe import planned_devices, probe_allocator, probe_backend, with_served

API = (1, 0)
"""The interface version that this distribution is written for."""

EXACT = Capabilities(kv_types=("fp16", "fp32", "int8"), exact=True)
"""What core's device kernels can do: every weight type, with the CPU's bits."""


def _build_backend(context: BackendContext) -> Backend:
    from strata_core.kernels.code_cache import open_cache
    from strata_core.kernels.device.backend import DeviceBackend
    from strata_hip.binding import load_binding
    from strata_hip.compiler import Compiler
    from strata_hip.runtime import HipRuntime

    binding = load_binding()
    cache = open_cache(context.options, context.degrade)
    runtime = HipRuntime(binding, Compiler(binding, cache))
    chosen = evolve(context, options=with_served(context.options, runtime.devices()))
    return DeviceBackend(runtime, chosen, capabilities=EXACT)


def _build_allocator(context: AllocatorContext) -> Allocator:
    from strata_core.memory.pinned import build

    return build(context)


@hookimpl
def strata_backends() -> list[BackendRecord]:
    """The backend for AMD graphics cards."""
    return [
        BackendRecord(
            name="hip",
            summary="AMD graphics cards through hip-python",
            api=API,
            probe=probe_backend,
            build=_build_backend,
            capabilities=EXACT,
            devices=planned_devices,
        )
    ]


@hookimpl
def strata_allocators() -> list[AllocatorRecord]:
    """Pinned host memory."""
    return [
        AllocatorRecord(
            name="hip-pinned",
            summary="Host memory pinned by the HIP runtime",
            api=API,
            serves=("hip",),
            probe=probe_allocator,
            build=_build_allocator,
        )
    ]
