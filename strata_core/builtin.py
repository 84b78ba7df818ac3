"""What core itself offers, through the same hooks as every plugin.

The modules behind `build` are imported when something is built, so that listing what there is
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    API,
    Allocator,
    AllocatorContext,
    AllocatorRecord,
    Backend,
    BackendContext,
    BackendRecord,
    BlobLayout,
    Capabilities,
    Probe,
    Source,
    SourceContext,
    SourceRecord,
    StartPolicy,
    Unusable,
    Usable,
)

if TYPE_CHECKING:
    from strata_core.machine import Machine
    from strata_core.runtime import Device


def _as_float32(_type: str, elements: int) -> int:
    return 4 * elements


def _matrices(layout: BlobLayout) -> int:
    return sum(4 * part.rows * part.columns for part in layout.parts)


REFERENCE = Capabilities(
    kv_types=("fp32", "fp16"), exact=False, dense_bytes=_as_float32, expert_bytes=_matrices
)
"""The reference computes with every type, on float32 weights: the dense ones are kept so, an expert
for as long as it is computed."""


CPU = Capabilities(kv_types=("fp16", "fp32", "int8"), exact=True)
"""The CPU backend computes with every type, on weights as they are stored."""


SIM = CPU
"""The simulated accelerator runs the CPU's kernels."""


def _build_cpu(context: BackendContext) -> Backend:
    from strata_core.kernels.cpu.backend import build

    return build(context)


def _build_reference(context: BackendContext) -> Backend:
    from strata_core.kernels.reference_backend import build

    return build(context)


def _build_sim(context: BackendContext) -> Backend:
    from strata_core.testing.sim_backend import build

    return build(context)


def _sim_devices(_machine: Machine, options: Mapping[str, Any]) -> Sequence[Device]:
    from strata_core.testing.sim_backend import devices

    return devices(options)


def _sim_pins(_machine: Machine, options: Mapping[str, Any]) -> int | None:
    from strata_core.testing.sim_backend import pins

    return pins(options)


def _build_host(context: AllocatorContext) -> Allocator:
    from strata_core.memory.host import build

    return build(context)


def _build_sim_pinned(context: AllocatorContext) -> Allocator:
    from strata_core.memory.pinned import build

    return build(context, StartPolicy(embedding="pinned"))


def _build_arena(context: SourceContext) -> Source:
    from strata_core.sources.arena import build

    return build(context)


def _build_mmap(context: SourceContext) -> Source:
    from strata_core.sources.mmap import build

    return build(context)


def _build_sliced_pinned(context: SourceContext) -> Source:
    from strata_core.sources.sliced_pinned import build

    return build(context)


def _build_tiered_file(context: SourceContext) -> Source:
    from strata_core.sources.tiered_file import build

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
        BackendRecord(
            name="sim",
            summary="A simulated accelerator: devices with memory of their own, on the CPU",
            api=API,
            probe=_compiles,
            build=_build_sim,
            capabilities=SIM,
            automatic=False,
            devices=_sim_devices,
        ),
    ]


@hookimpl
def strata_allocators() -> list[AllocatorRecord]:
    """Host memory for backends without devices, and for the simulated one."""
    return [
        AllocatorRecord(
            name="host",
            summary="Pageable host memory",
            api=API,
            serves=("cpu", "reference"),
            probe=_anywhere,
            build=_build_host,
        ),
        AllocatorRecord(
            name="sim-pinned",
            summary="Host memory that the simulated devices can address and copy",
            api=API,
            serves=("sim",),
            probe=_anywhere,
            build=_build_sim_pinned,
            pins=_sim_pins,
        ),
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
        SourceRecord(
            name="sliced-pinned",
            summary="Experts that no device holds copied into host memory, slice by slice",
            api=API,
            probe=_anywhere,
            build=_build_sliced_pinned,
        ),
        SourceRecord(
            name="tiered-file",
            summary="The most-read experts in host memory, the rest read unbuffered from the file",
            api=API,
            probe=_anywhere,
            build=_build_tiered_file,
        ),
    ]
