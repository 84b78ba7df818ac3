"""What core itself offers, through the same hooks as every plugin.

The modules behind `build` are imported when something is built, so that listing what there is
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    API,
    Allocator,
    AllocatorContext,
    AllocatorRecord,
    Backend,
    BackendContext,
    BackendRecord,
    Capabilities,
    Probe,
    Source,
    SourceContext,
    SourceRecord,
    Unusable,
    Usable,
)

if TYPE_CHECKING:
    from strata_core.machine import Machine


def _as_float32(_type: str, elements: int) -> int:
    return 4 * elements


REFERENCE = Capabilities(kv_types=("fp32", "fp16"), exact=False, dense_bytes=_as_float32)
"""The reference computes with every type, on dense weights that it keeps as float32."""


CPU = Capabilities(kv_types=("fp16", "fp32", "int8"), exact=True)
"""The CPU backend computes with every type, on weights as they are stored."""


def _build_cpu(context: BackendContext) -> Backend:
    from strata_core.kernels.cpu.backend import build

    return build(context)


def _build_reference(context: BackendContext) -> Backend:
    from strata_core.kernels.reference_backend import build

    return build(context)


def _build_host(context: AllocatorContext) -> Allocator:
    from strata_core.memory.host import build

    return build(context)


def _build_arena(context: SourceContext) -> Source:
    from strata_core.sources.arena import build

    return build(context)


def _build_mmap(context: SourceContext) -> Source:
    from strata_core.sources.mmap import build

    return build(context)


def _anywhere(machine: Machine) -> Probe:
    return Usable(f"{machine.os} {machine.architecture}")


def _compiles(machine: Machine) -> Probe:
    found = machine.has_module("llvmlite")
    if found is None:
        return Unusable("whether the package llvmlite is installed there was not recorded")
    if not found:
        return Unusable(
            "the package llvmlite, which compiles the kernels, is not installed",
            "pip install llvmlite",
        )
    return Usable(f"{machine.architecture}, {machine.physical_cores} cores")


@hookimpl
def strata_backends() -> list[BackendRecord]:
    """The CPU's compiled kernels, and the backend that every other one is measured against."""
    return [
        BackendRecord(
            name="cpu",
            summary="Compiled kernels on the CPU, with the same bits wherever the weights lie",
            api=API,
            probe=_compiles,
            build=_build_cpu,
            supersedes=("reference",),
            fallback=True,
            capabilities=CPU,
        ),
        BackendRecord(
            name="reference",
            summary="NumPy in float32 on the CPU: slow, obvious, needs nothing",
            api=API,
            probe=_anywhere,
            build=_build_reference,
            fallback=True,
            capabilities=REFERENCE,
        ),
    ]


@hookimpl
def strata_allocators() -> list[AllocatorRecord]:
    """The allocator for backends that need no device memory."""
    return [
        AllocatorRecord(
            name="host",
            summary="Pageable host memory",
            api=API,
            serves=("cpu", "reference"),
            probe=_anywhere,
            build=_build_host,
        )
    ]


@hookimpl
def strata_expert_sources() -> list[SourceRecord]:
    """The sources that the planner chooses between."""
    return [
        SourceRecord(
            name="arena",
            summary="All experts copied into host memory",
            api=API,
            probe=_anywhere,
            build=_build_arena,
        ),
        SourceRecord(
            name="mmap",
            summary="Experts read from the mapped model file, page by page",
            api=API,
            probe=_anywhere,
            build=_build_mmap,
        ),
    ]
