"""The HIP library that is in this process: which one, and whether it has what is called here."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from strata_core.errors import DeviceError
from strata_hip.binding import MATCHING, Binding

NEEDED = (
    "hipDeviceGetAttribute",
    "hipDeviceSynchronize",
    "hipEventCreateWithFlags",
    "hipEventDestroy",
    "hipEventElapsedTime",
    "hipEventQuery",
    "hipEventRecord",
    "hipFree",
    "hipGetDeviceCount",
    "hipGetDevicePropertiesR0600",
    "hipGetLastError",
    "hipGraphDestroy",
    "hipGraphExecDestroy",
    "hipGraphInstantiateWithFlags",
    "hipGraphLaunch",
    "hipHostFree",
    "hipHostGetDevicePointer",
    "hipHostMalloc",
    "hipHostRegister",
    "hipHostUnregister",
    "hipMalloc",
    "hipMemGetInfo",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipModuleGetFunction",
    "hipModuleLaunchKernel",
    "hipModuleLoadData",
    "hipModuleUnload",
    "hipRuntimeGetVersion",
    "hipSetDevice",
    "hipStreamBeginCapture",
    "hipStreamCreateWithFlags",
    "hipStreamDestroy",
    "hipStreamEndCapture",
    "hipStreamSynchronize",
    "hipStreamWaitEvent",
)
"""The library's symbols behind all functions that this plugin calls."""


def opened_library(binding: Binding) -> str:
    """Path of the library that the binding opened. Raises DeviceError where there is none.

    Another copy of it than the binding's would be another runtime with handles of its own.
    """
    with suppress(DeviceError):  # a call that opens it; what it answers is another's matter
        binding.call("count devices", binding.hip.hipGetDeviceCount)
    return mapped_library()


def mapped_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Path of the one HIP library in this process. Raises DeviceError for none or several."""
    found = set()
    for line in maps.read_text("utf-8", "replace").splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if "amdhip64" in Path(path).name:
            found.add(path)
    if len(found) == 1:
        return found.pop()
    if found:
        raise DeviceError(
            "there are several HIP libraries in this process",
            f"mapped are {', '.join(sorted(found))}; each has devices and handles of its own",
            "let one ROCm be found: ROCM_PATH and LD_LIBRARY_PATH must not name different ones",
        )
    raise DeviceError(
        "the HIP library cannot be found in this process",
        "the binding answers, but no file named libamdhip64 is mapped",
        "tell its authors, with the output of `strata doctor --json`",
    )


def lacking(path: str) -> list[str]:
    """What a library has not of what is called here."""
    library = ctypes.CDLL(path)
    return [name for name in NEEDED if not hasattr(library, name)]


def check_library() -> None:
    """Raise DeviceError unless one library is open, with every function; names all it lacks."""
    path = mapped_library()
    if missing := lacking(path):
        raise DeviceError(
            f"the HIP library lacks {', '.join(missing)}",
            f"{path} is older than the functions that are called",
            MATCHING,
        )
