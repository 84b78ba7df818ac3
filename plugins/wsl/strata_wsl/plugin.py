"""The record that this distribution offers.

WSL is no backend: the GPU under it is computed with as everywhere. What differs is host memory,
of which the driver pins little, so the allocator takes the place of the usual one there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_core.errors import PluginError
from strata_core.hookspecs import hookimpl
from strata_core.interfaces import Allocator, AllocatorContext, AllocatorRecord, Probe, Unusable
from strata_wsl import __version__

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
    return Unusable(
        f"strata-wsl {__version__} cannot pin memory yet",
        "nothing is wrong with this machine: a later version of strata-wsl will use it",
    )


def _build(_context: AllocatorContext) -> Allocator:
    raise PluginError(
        "allocator 'wsl' cannot be built",
        f"strata-wsl {__version__} has no pinned memory yet",
        "use --allocator auto",
    )


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
        )
    ]
