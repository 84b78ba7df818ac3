"""The stub library built with the machine's C compiler, and two ways to reach it.

`stand_in` has the modules of hip-python before version 10, over ctypes, in this process; the real
hip-python reaches the same library where ROCM_PATH names its folder.
"""

from __future__ import annotations

import ctypes
import enum
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

SOURCE = Path(__file__).with_name("stub_hip.c")
KINDS = (
    "block", "pinned", "registered", "stream", "event", "graph", "instance", "module", "program",
)  # fmt: skip
"""Numbered from 1 in the stub."""


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def library_of(rocm: Path) -> Path:
    """The library of a ROCM_PATH: HIP's, else the one under a name of its own."""
    (found,) = (f for f in (rocm / "lib").glob("*.so") if f.name != "libhiprtc.so")
    return found


def build(folder: Path, *options: str, name: str = "libamdhip64.so") -> Path:
    """ROCM_PATH for a library of that kind, and hiprtc beside it.

    Another name keeps it apart: the plugin refuses two libraries of HIP's name in a process.
    """
    library = folder / "lib" / name
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler(), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *options]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, timeout=240)
    (library.parent / "libhiprtc.so").symlink_to(library.name)
    return folder


class Control:
    """What a test steers the stub with."""

    def __init__(self, rocm: Path) -> None:
        self.library = ctypes.CDLL(str(library_of(rocm)))
        self.library.stub_failed.restype = ctypes.c_char_p
        self.library.stub_calls.restype = ctypes.c_long

    def fail(self, nth: int = 0, status: int = 0, name: str | None = None) -> None:
        """The nth call from now on (of that name) answers the status; 0 lets all go through."""
        text = name.encode() if name else None
        self.library.stub_fail(text, ctypes.c_long(nth), status)

    def architecture(self, device: int, name: str) -> None:
        """What the device is from now on."""
        self.library.stub_architecture(device, name.encode())

    @property
    def calls(self) -> int:
        """Calls since the last `fail`."""
        return self.library.stub_calls()

    @property
    def failed(self) -> str:
        return self.library.stub_failed().decode()

    @property
    def device(self) -> int:
        return self.library.stub_device()

    def alive(self) -> dict[str, int]:
        """How many there are of each kind that there is something of."""
        counts = {k: self.library.stub_alive(n + 1) for n, k in enumerate(KINDS)}
        return {kind: count for kind, count in counts.items() if count}


hipError_t = enum.IntEnum(  # noqa: N816 - HIP's name, and so on
    "hipError_t",
    {
        "hipSuccess": 0,
        "hipErrorInvalidValue": 1,
        "hipErrorOutOfMemory": 2,
        "hipErrorNotInitialized": 3,
        "hipErrorInsufficientDriver": 35,
        "hipErrorNoDevice": 100,
        "hipErrorInvalidDevice": 101,
        "hipErrorOperatingSystem": 304,
        "hipErrorInvalidHandle": 400,
        "hipErrorNotFound": 500,
        "hipErrorNotReady": 600,
        "hipErrorIllegalAddress": 700,
        "hipErrorHostMemoryAlreadyRegistered": 712,
        "hipErrorHostMemoryNotRegistered": 713,
        "hipErrorNotSupported": 801,
        "hipErrorUnknown": 999,
    },
)


class hiprtcResult(int):  # noqa: N801
    """A status by its number."""

    name = property(lambda self: f"HIPRTC_{int(self)}")


class Pointer:
    """An object of the binding that stands for an address."""

    def __init__(self, address: int) -> None:
        self._as_parameter_ = ctypes.c_void_p(address)

    def __int__(self) -> int:
        return self._as_parameter_.value or 0

    def createRef(self) -> Pointer:  # noqa: N802
        self.cell = ctypes.c_void_p(int(self))
        return Pointer(ctypes.addressof(self.cell))


class hipDeviceProp_t:  # noqa: N801
    """The structure, and its fields at their places."""

    def __init__(self) -> None:
        self._as_parameter_ = self.raw = ctypes.create_string_buffer(1472)

    name = property(lambda self: ctypes.string_at(self.raw, 256).partition(b"\0")[0])
    gcnArchName = property(lambda self: self.raw[1160:1416].partition(b"\0")[0])  # noqa: N815
    totalGlobalMem = property(lambda self: self._number(288, 8))  # noqa: N815
    warpSize = property(lambda self: self._number(308, 4))  # noqa: N815
    multiProcessorCount = property(lambda self: self._number(388, 4))  # noqa: N815

    def _number(self, at: int, size: int) -> int:
        return int.from_bytes(self.raw[at : at + size], "little")


P, D, U, N, Q = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_ulonglong
FUNCTIONS = {
    # what a call returns behind its status, then what it is given
    "hipGetDeviceCount": ((D,), ()),
    "hipRuntimeGetVersion": ((D,), ()),
    "hipSetDevice": ((), (D,)),
    "hipDeviceSynchronize": ((), ()),
    "hipGetLastError": ((), ()),
    "hipMemGetInfo": ((N, N), ()),
    "hipDeviceGetAttribute": ((D,), (D, D)),
    "hipMalloc": ((P,), (N,)),
    "hipFree": ((), (P,)),
    "hipHostMalloc": ((P,), (N, U)),
    "hipHostFree": ((), (P,)),
    "hipHostRegister": ((), (P, N, U)),
    "hipHostUnregister": ((), (P,)),
    "hipHostGetDevicePointer": ((P,), (P, U)),
    "hipStreamCreateWithFlags": ((P,), (U,)),
    "hipStreamDestroy": ((), (P,)),
    "hipStreamSynchronize": ((), (P,)),
    "hipStreamWaitEvent": ((), (P, P, U)),
    "hipEventCreateWithFlags": ((P,), (U,)),
    "hipEventDestroy": ((), (P,)),
    "hipEventRecord": ((), (P, P)),
    "hipEventQuery": ((), (P,)),
    "hipEventElapsedTime": ((ctypes.c_float,), (P, P)),
    "hipMemcpyAsync": ((), (P, P, N, D, P)),
    "hipMemsetAsync": ((), (P, D, N, P)),
    "hipStreamBeginCapture": ((), (P, D)),
    "hipStreamEndCapture": (("after", P), (P,)),
    "hipGraphInstantiateWithFlags": ((P,), (P, Q)),
    "hipGraphDestroy": ((), (P,)),
    "hipGraphExecDestroy": ((), (P,)),
    "hipGraphLaunch": ((), (P, P)),
    "hipModuleLoadData": ((P,), (ctypes.c_char_p,)),
    "hipModuleUnload": ((), (P,)),
    "hipModuleGetFunction": ((P,), (P, ctypes.c_char_p)),
    "hipModuleLaunchKernel": ((), (P, U, U, U, U, U, U, U, P, P, P)),
    "hipGetDeviceProperties": ((), (P, D)),
    "hiprtcVersion": ((D, D), ()),
    "hiprtcCreateProgram": ((P,), (ctypes.c_char_p, ctypes.c_char_p, D, P, P)),
    "hiprtcDestroyProgram": ((), (P,)),
    "hiprtcCompileProgram": ((), (P, D, P)),
    "hiprtcGetProgramLogSize": (("after", N), (P,)),
    "hiprtcGetProgramLog": ((), (P, P)),
    "hiprtcGetCodeSize": (("after", N), (P,)),
    "hiprtcGetCode": ((), (P, P)),
}
SYMBOLS = {"hipGetDeviceProperties": "hipGetDevicePropertiesR0600"}


def stand_in(rocm: Path) -> tuple[ModuleType, ModuleType]:
    """The modules hip.hip and hip.hiprtc over the library of that ROCM_PATH."""
    made = []
    for name, status in (("hip", hipError_t), ("hiprtc", hiprtcResult)):
        module = ModuleType(f"hip.{name}")
        for function, (outs, ins) in FUNCTIONS.items():
            if function.startswith("hiprtc") == (name == "hiprtc"):
                setattr(module, function, _function(rocm, function, outs, ins, status))
        made.append(module)
    made[0].hipDeviceProp_t = hipDeviceProp_t
    made[0].hipDeviceAttribute_t = SimpleNamespace(hipDeviceAttributeWallClockRate=10017)
    made[0].hipMemcpyKind = made[0].hipStreamCaptureMode = int
    return made[0], made[1]


def _function(rocm: Path, name: str, outs: tuple, ins: tuple, status: type):
    symbol, after = SYMBOLS.get(name, name), outs[:1] == ("after",)
    kinds = outs[1:] if after else outs

    def call(*args):
        try:
            library = ctypes.CDLL(str(library_of(rocm)))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"failed to dlopen 'libamdhip64.so': {error}") from None
        try:
            real = library[symbol]
        except AttributeError:
            raise RuntimeError(f"failed to dlsym 'b'{symbol}'': undefined symbol") from None
        cells = [kind() for kind in kinds]
        places = [ctypes.byref(cell) for cell in cells]
        given = [_given(kind, arg) for kind, arg in zip(ins, args, strict=True)]
        if name == "hiprtcCreateProgram":
            order = [*places, *given]
        else:
            order = [*given, *places] if after else [*places, *given]
        code = status(real(*order))
        values = [cell.value for cell in cells]
        return (
            code,
            *(Pointer(v or 0) if k is P else v for k, v in zip(kinds, values, strict=True)),
        )

    call.__name__ = name
    return call


def _given(kind: type, arg: object) -> object:
    """An argument as ctypes takes it."""
    if isinstance(arg, list):
        return (ctypes.c_char_p * len(arg))(*arg)
    if isinstance(arg, bytearray):
        return (ctypes.c_char * len(arg)).from_buffer(arg)
    if isinstance(arg, Pointer | hipDeviceProp_t):
        return arg._as_parameter_
    return kind(arg)
