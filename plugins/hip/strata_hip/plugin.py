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
from strata_hip import __version__
from strata_hip.probe import probe_allocator, probe_backend

API = (1, 0)
"""The interface version that this distribution is written for."""


def _build_backend(_context: BackendContext) -> Backend:
    raise _missing("backend 'hip'", "kernels")


def _build_allocator(_context: AllocatorContext) -> Allocator:
    raise _missing("allocator 'hip-pinned'", "pinned memory")


def _missing(what: str, part: str) -> PluginError:
    return PluginError(
        f"{what} cannot be built",
        f"strata-hip {__version__} has no {part} yet",
        "use --backend auto",
    )


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
