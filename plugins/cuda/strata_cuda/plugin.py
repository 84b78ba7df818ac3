"""The records that this distribution offers. Importing this opens no library and no device."""

from __future__ import annotations

from strata_core.errors import PluginError
from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    AllocatorRecord,
    Backend,
    BackendContext,
    BackendRecord,
)
from strata_cuda import __version__
from strata_cuda.probe import probe_allocator, probe_backend

API = (1, 0)
"""The interface version that this distribution is written for."""


def _build_backend(_context: BackendContext) -> Backend:
    raise _missing("backend 'cuda'", "kernels")


def _build_allocator(_context: AllocatorContext) -> Allocator:
    raise _missing("allocator 'cuda-pinned'", "pinned memory")


def _missing(what: str, part: str) -> PluginError:
    return PluginError(
        f"{what} cannot be built",
        f"strata-cuda {__version__} has no {part} yet",
        "use --backend auto",
    )


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
