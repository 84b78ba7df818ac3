"""Whether this machine can be served: the first obstacle, in the order a user would clear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strata_core.interfaces import Probe, Unusable, Usable
from strata_core.runtime import Device
from strata_cuda.driver import ask_driver

if TYPE_CHECKING:
    from strata_core.machine import Machine

VENDOR = "0x10de"

PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64"), ("windows", "x86_64")}
"""(os, architecture) that the driver and CuPy both exist for."""

LIBRARIES = {
    "linux": ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"),
    "windows": ("nvcuda.dll",),
}
"""The driver's library by system; the second one is WSL's, which a container may not search."""

DEVICE_FILES = ("/dev/dxg", "/dev/nvidiactl", "/dev/nvmap")
"""Signs of an adapter that PCI does not show: WSL, a sandbox that hides PCI, an integrated GPU."""

DRIVER = 12000
"""Oldest driver, as cuDriverGetVersion counts: the CuPy packages are made for CUDA 12 and 13."""

CAPABILITY = (7, 0)
"""Oldest compute capability: loads and stores ordered between GPU and host begin there."""

MATRIX_CAPABILITY = (7, 5)
"""Compute capability from which on devices multiply matrices of bytes."""

WARP = 32
"""Threads that run together, on every device there is."""

_NOT_RECORDED = "record the machine again with `strata doctor --json` and strata-cuda installed"

_REMEDIES = {
    2: "the driver is out of memory before anything was asked of it: end other GPU programs",
    34: "a stub library was loaded: remove CUDA's stubs folder from the library search path",
    100: "check that the GPU is passed through and not hidden by CUDA_VISIBLE_DEVICES",
    802: "start the fabric manager service and try again",
    803: "the driver's library and its kernel module differ: restart the computer",
    804: "a compatibility library was loaded on a GPU that it is not for: remove cuda-compat",
}
"""Hints by CUresult."""


def probe_backend(machine: Machine) -> Probe:
    """The first obstacle to computing here, else driver and devices. Creates no context."""
    return find_obstacle(machine) or _found(machine)


def probe_allocator(machine: Machine) -> Probe:
    """The first obstacle to pinning memory here: the same as the backend's."""
    return probe_backend(machine)


def _found(machine: Machine) -> Usable:
    answer = _driver(machine)
    assert not isinstance(answer, Unusable)
    named = ", ".join(
        f"{device['name']} ({'.'.join(map(str, device['capability']))})"
        for device in answer["devices"]
    )
    return Usable(f"CUDA {_dotted(answer['version'])}: {named}")


def planned_devices(machine: Machine, _options: Mapping[str, Any]) -> Sequence[Device]:
    """The devices as the driver lists them, for planning; none where it does not answer."""
    answer = _driver(machine) if machine.os in LIBRARIES else None
    if not isinstance(answer, dict):
        return ()
    return [
        Device(
            index=index,
            label=f"CUDA{index}",
            name=device["name"],
            architecture="sm_{}{}".format(*device["capability"]),
            total=device["memory"],
            units=device.get("units", 0),
            warp=WARP,
            matrix=tuple(device["capability"]) >= MATRIX_CAPABILITY,
        )
        for index, device in enumerate(answer["devices"])
    ]


def find_obstacle(machine: Machine) -> Unusable | None:
    """What of platform, adapter, driver, devices and CuPy is missing first; None if nothing."""
    obstacle = _platform(machine) or _adapter(machine)
    if obstacle:
        return obstacle
    answer = _driver(machine)
    if isinstance(answer, Unusable):
        return answer
    return _refusal(answer) or _devices(answer) or _cupy(machine, answer["version"])


def _platform(machine: Machine) -> Unusable | None:
    if (machine.os, machine.architecture) in PLATFORMS:
        return None
    where = f"{machine.os} on {machine.architecture}"
    return Unusable(f"there is no CUDA driver or no CuPy package for {where}")


def _adapter(machine: Machine) -> Unusable | None:
    """Only Linux lists every adapter: Windows leaves out those that drive no display."""
    if machine.os != "linux" or machine.adapters is None:
        return None
    if any(adapter.vendor == VENDOR for adapter in machine.adapters):
        return None
    if any(machine.has_path(path) for path in DEVICE_FILES):
        return None
    if machine.wsl == 2:
        return Unusable(
            "WSL 2 offers no graphics adapter (/dev/dxg is missing)",
            "update the Windows driver, then run `wsl --update` and `wsl --shutdown` in Windows",
        )
    return Unusable(
        "no NVIDIA graphics adapter on PCI",
        "in a virtual machine or container, pass the adapter through",
    )


def _driver(machine: Machine) -> Unusable | dict[str, Any]:
    """What the driver says, as `ask_driver` describes it, or why there is nothing to ask."""
    names = LIBRARIES[machine.os]
    library = machine.find_library(*names)
    if library is None:
        return Unusable("the recorded facts do not say whether there is a driver", _NOT_RECORDED)
    if not library:
        return Unusable(f"the NVIDIA driver's library is not found ({names[0]})", _install(machine))
    answer: dict[str, Any] | None = machine.observe("cuda:driver", partial(ask_driver, library))
    if answer is None:
        return Unusable("the recorded facts hold no answer of the driver", _NOT_RECORDED)
    return answer


def _install(machine: Machine) -> str:
    if machine.wsl:
        return "install the NVIDIA driver in Windows, not in WSL, then run `wsl --shutdown`"
    if machine.container:
        return "start the container with its GPUs, e.g. `docker run --gpus all`"
    return "install the NVIDIA driver"


def _refusal(answer: dict[str, Any]) -> Unusable | None:
    """What the driver answered instead of its devices."""
    code = answer["code"]
    if code == 0:
        return None
    name = answer["error"] or "an unknown error"
    return Unusable(
        f"the NVIDIA driver is there, but {answer['call']} answers {name} ({code})",
        _REMEDIES.get(code, "run `nvidia-smi`; if it fails too, repair the driver"),
    )


def _devices(answer: dict[str, Any]) -> Unusable | None:
    version = answer["version"]
    if version < DRIVER:
        return Unusable(
            f"the NVIDIA driver supports CUDA {_dotted(version)}, {_dotted(DRIVER)} is needed",
            "update the NVIDIA driver",
        )
    devices = answer["devices"]
    if not devices:
        return Unusable("the NVIDIA driver is there, but counts 0 devices", _REMEDIES[100])
    if all(tuple(device["capability"]) < CAPABILITY for device in devices):
        found = ", ".join(
            f"{device['name']} has {'.'.join(map(str, device['capability']))}" for device in devices
        )
        return Unusable(f"compute capability {'.'.join(map(str, CAPABILITY))} is needed: {found}")
    return None


def _cupy(machine: Machine, version: int) -> Unusable | None:
    there = machine.has_module("cupy")
    if there:
        return None
    if there is None:
        return Unusable("the recorded facts do not say whether CuPy is installed", _NOT_RECORDED)
    extra = "cuda13" if version >= 13000 else "cuda12"
    return Unusable("CuPy is not installed", f"pip install 'strata-cuda[{extra}]'")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
