"""The record that this distribution offers.

WSL is no backend: the GPU under it is computed with as everywhere. What differs is host memory,
of which the driver pins little, so the allocator takes the place of the usual one there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    AllocatorRecord,
    Probe,
    Unusable,
    Usable,
)

if TYPE_CHECKING:
    from strata_core.machine import Machine

API = (1, 0)
"""The interface version that this distribution is written for."""

DEVICE = "/dev/dxg"
"""The adapter that WSL 2 lends from Windows."""


def probe(machine: Machine) -> Probe:
    """Whether this is WSL 2 with a graphics adapter; opens nothing."""
    if machine.wsl is None:
        return Unusable("this machine does not run under WSL")
    if machine.wsl == 1:
        return Unusable(
            "WSL 1 offers no graphics adapter",
            "change the distribution to WSL 2: `wsl --set-version NAME 2` in Windows",
        )
    there = machine.has_path(DEVICE)
    if there is None:
        return Unusable(
            f"the recorded facts do not say whether {DEVICE} exists",
            "record the machine again with `strata doctor --json` and strata-wsl installed",
        )
    if not there:
        hint = "update the Windows driver, then run `wsl --update` and `wsl --shutdown` in Windows"
        if machine.container:
            hint = f"start the container with its GPUs, or with `--device {DEVICE}`"
        return Unusable(f"WSL 2 offers no graphics adapter ({DEVICE} is missing)", hint)
    return Usable(f"WSL 2, {DEVICE}")


def _build(context: AllocatorContext) -> Allocator:
    from strata_wsl.allocator import build

    return build(context)


def _pins(machine: Machine, options: Mapping[str, Any]) -> int | None:
    from strata_wsl.allocator import pins

    return pins(machine, options)


@hookimpl
def strata_allocators() -> list[AllocatorRecord]:
    """The allocator for a driver that pins almost nothing."""
    return [
        AllocatorRecord(
            name="wsl",
            summary="Host memory under WSL 2, where the driver pins little",
            api=API,
            serves=("cuda",),
            supersedes=("cuda-pinned",),
            probe=probe,
            build=_build,
            pins=_pins,
        )
    ]
