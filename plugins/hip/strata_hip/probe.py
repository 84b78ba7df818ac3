"""Whether this machine can be served: the first obstacle, in the order a user would clear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strata_core.errors import StrataError
from strata_core.interfaces import Probe, Unusable, Usable
from strata_core.runtime import Device
from strata_core.setting_device import MOST_HELPERS
from strata_hip.architectures import FAMILIES, serves
from strata_hip.binding import NO_DEVICE_HINT
from strata_hip.kernel_driver import can_open, list_gpus

if TYPE_CHECKING:
    from strata_core.machine import Machine

VENDOR = "0x1002"

DEVICE = "/dev/kfd"
"""The compute interface of the amdgpu kernel driver."""

LIBRARIES = tuple(
    f"{folder}libamdhip64.so{suffix}"
    for folder in ("", "/opt/rocm/lib/")
    for suffix in ("", ".7", ".6")
)
"""The HIP runtime, by name and where ROCm's packages put it; `.so` alone is a developer's link."""

_NOT_RECORDED = "record the machine again with `strata doctor --json` and strata-hip installed"


def probe_backend(machine: Machine) -> Probe:
    """Whether AMD's devices can compute here. Opens the library but no context."""
    return find_obstacle(machine) or _devices(machine)


def probe_allocator(machine: Machine) -> Probe:
    """Whether memory can be pinned here; what serves the one serves the other."""
    return probe_backend(machine)


def find_obstacle(machine: Machine) -> Unusable | None:
    """What of platform, adapter, driver, runtime and hip-python is missing first, or None.

    With hip-python there it is asked itself, in the end: it alone knows which library it opens,
    and a second copy of the runtime in this process would be another world.
    """
    return (
        _platform(machine) or _adapter(machine) or _kernel_driver(machine) or _hip_python(machine)
    )


def _devices(machine: Machine) -> Probe:
    """The answer of the runtime itself, and whether there are kernels for what it lists."""
    found = machine.observe("hip:devices", ask_devices)
    if found is None:
        return Unusable("the recorded facts do not say what the HIP runtime answers", _NOT_RECORDED)
    if found["error"]:
        return Unusable(found["error"], found["hint"])
    if not found["devices"]:
        return Unusable("the HIP runtime is there, but counts 0 devices", NO_DEVICE_HINT)
    served = [d for d in found["devices"] if serves(d["architecture"])]
    if not served:
        names = ", ".join(f"{d['name']} ({d['architecture']})" for d in found["devices"])
        return Unusable(
            f"there are no kernels for {names}", f"devices of {', '.join(FAMILIES)} are served"
        )
    return Usable(", ".join(f"{d['name']} ({d['architecture']})" for d in served))


def ask_devices() -> dict[str, Any]:
    """What the runtime says: `devices` as JSON data, or `error` with a `hint`."""
    from strata_hip.binding import load_binding
    from strata_hip.runtime import describe_all

    try:
        devices = describe_all(load_binding())
    except StrataError as error:
        why = " ".join((error.why or error.what).split())
        return {"error": f"{error.what}: {why}", "hint": error.remedy, "devices": []}
    fields = ("name", "architecture", "total", "units", "warp")
    named = [{name: getattr(d, name) for name in fields} for d in devices]
    return {"error": "", "hint": "", "devices": named}


def planned_devices(machine: Machine, options: Mapping[str, Any]) -> Sequence[Device]:
    """The devices that may be used, for planning; none where the runtime does not answer.

    Those that there are kernels for, by their place in the runtime's list; with --device all, so
    that one which was named and cannot be served is refused by name.
    """
    found = machine.observe("hip:devices", ask_devices)
    if found is None:
        return ()
    made = [
        Device(
            index=index,
            label=f"HIP{index}",
            name=device["name"],
            architecture=device["architecture"],
            total=device.get("total", 0),
            units=device.get("units", 0),
            warp=device.get("warp", 0),
        )
        for index, device in enumerate(found["devices"])
    ]
    return made if options.get("device") else served_of(made)


def served_of(devices: Sequence[Device]) -> list[Device]:
    """Those that there are kernels for, in their order; a graphics core of a CPU may be none."""
    return [device for device in devices if serves(device.architecture)]


def with_served(options: Mapping[str, Any], devices: Sequence[Device]) -> Mapping[str, Any]:
    """The options, with --device where nobody named one and not every device can be served."""
    served = served_of(devices)
    if options.get("device") or not served or len(served) == len(devices):
        return options
    indices = tuple(device.index for device in served)
    return {**options, "device": indices[: MOST_HELPERS + 1]}


def _platform(machine: Machine) -> Unusable | None:
    if (machine.os, machine.architecture) == ("linux", "x86_64"):
        return None
    where = f"{machine.os} on {machine.architecture}"
    return Unusable(
        f"there is no hip-python package for {where}, only for linux on x86_64",
        "start Linux on a processor of that kind, or choose another backend",
    )


def _adapter(machine: Machine) -> Unusable | None:
    if machine.adapters is None or machine.has_path(DEVICE):
        return None
    if any(adapter.vendor == VENDOR for adapter in machine.adapters):
        return None
    if machine.wsl:
        return Unusable(
            "AMD graphics cards under WSL are not supported",
            "start Linux itself, or choose another backend",
        )
    return Unusable(
        "no AMD graphics adapter on PCI",
        "in a virtual machine or container, pass the adapter through",
    )


def _kernel_driver(machine: Machine) -> Unusable | None:
    there = machine.has_path(DEVICE)
    if there is None:
        return Unusable(f"the recorded facts do not say whether {DEVICE} exists", _NOT_RECORDED)
    if not there:
        hint = "load the amdgpu kernel module"
        if machine.container:
            hint = f"start the container with `--device {DEVICE} --device /dev/dri`"
        return Unusable(f"the amdgpu compute driver is not there ({DEVICE} is missing)", hint)
    allowed = machine.observe(f"hip:open {DEVICE}", partial(can_open, DEVICE))
    gpus = machine.observe("hip:gpus", list_gpus)
    if allowed is None or gpus is None:
        return Unusable(f"the recorded facts do not say what {DEVICE} offers", _NOT_RECORDED)
    if not allowed:
        return Unusable(
            f"{DEVICE} may not be opened by this user",
            "add the user to the groups render and video, and log in again",
        )
    if not gpus:
        return Unusable(
            "the amdgpu compute driver lists no GPU",
            "check that the driver supports this adapter (`dmesg` names what it leaves out)",
        )
    return None


def _hip_python(machine: Machine) -> Unusable | None:
    there = [machine.has_module(name) for name in ("rocm", "hip")]
    if any(there):
        return None
    library = machine.find_library(*LIBRARIES)
    if library is None:
        return Unusable("the recorded facts do not say whether ROCm is installed", _NOT_RECORDED)
    if not library:
        return Unusable("the HIP runtime is not found (libamdhip64.so)", "install ROCm 6 or newer")
    if None in there:
        return Unusable("the recorded facts do not say whether there is hip-python", _NOT_RECORDED)
    return Unusable("hip-python is not installed", "pip install hip-python, in ROCm's version")
