"""The records that this distribution offers. Importing this opens no library and no device."""

from __future__ import annotations

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
from strata_cuda.probe import planned_devices, probe_allocator, probe_backend

API = (1, 0)
"""The interface version that this distribution is written for."""

EXACT = Capabilities(kv_types=("fp16", "fp32", "int8"), exact=True)
"""The kernels compute with every type, on weights as they are stored."""


def _build_backend(context: BackendContext) -> Backend:
    from strata_core.kernels.device.backend import DeviceBackend
    from strata_cuda.build import runtime_of

    return DeviceBackend(runtime_of(context), context, capabilities=EXACT)


def _build_allocator(context: AllocatorContext) -> Allocator:
    from strata_core.memory.pinned import build

    return build(context)


@hookimpl
def strata_backends() -> list[BackendRecord]:
    """The backend for NVIDIA graphics cards."""
    return [
        BackendRecord(
            name="cuda",
            summary="NVIDIA graphics cards through CuPy",
            api=API,
            probe=probe_backend,
            build=_build_backend,
            capabilities=EXACT,
            devices=planned_devices,
        )
    ]


@hookimpl
def strata_allocators() -> list[AllocatorRecord]:
    """Pinned host memory where the driver pins what it is asked for."""
    return [
        AllocatorRecord(
            name="cuda-pinned",
            summary="Host memory pinned by the CUDA driver",
            api=API,
            serves=("cuda",),
            probe=probe_allocator,
            build=_build_allocator,
        )
    ]
