"""CuPy's modules and the driver's library, and the one place where their answers are checked.

CuPy gives the CUDA runtime, the run-time compiler and modules. What it has no word for, launching
with a packed argument block and launching graphs from compiled code, comes from the driver's
library by ctypes: handles of the two are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

from attrs import frozen

from strata_core.errors import REPORT, DeviceError, Refused
from strata_cuda.probe import LIBRARIES

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY."""

OPERATING_SYSTEM, NOT_SUPPORTED = 304, 801
"""What registering answers where the system locks no more pages, or none at all."""


@frozen
class Binding:
    """CuPy's `cuda.runtime`, `cuda.driver` and `cuda.nvrtc`, and the driver's library by ctypes."""

    runtime: Any
    modules: Any
    compiler: Any
    driver: Any

    def call(
        self,
        verb: str,
        function: Callable[..., Any],
        *args: Any,
        refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
    ) -> Any:
        """Call a function of CuPy. `verb` says what was wanted, in words.

        Raises Refused where the answer is one of `refusals`, else DeviceError. CuPy has cleared the
        runtime's pending error by then.
        """
        try:
            return function(*args)
        except RuntimeError as error:
            code = getattr(error, "status", None)
            if code is None:
                raise DeviceError(f"{verb} failed", str(error), REPORT) from error
            name = getattr(function, "__name__", "a function")
            raise failure(verb, name, int(code), str(error), refusals) from error

    def drive(self, verb: str, name: str, *args: Any) -> None:
        """Call a function of the driver's library, whose answer is a CUresult."""
        code = int(getattr(self.driver, name)(*args))
        if code:
            raise failure(verb, name, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self.driver.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
            return "an unknown error"
        return text.value.decode("ascii", "replace")


def failure(
    verb: str, name: str, code: int, text: str, refusals: tuple[int, ...] = (OUT_OF_MEMORY,)
) -> DeviceError:
    """The error of a call that did not answer success."""
    if code in refusals:
        return Refused(
            f"{verb}: refused",
            f"{name} answers {text} ({code})",
            "free memory of that kind, or ask for less",
        )
    return DeviceError(
        f"{verb} failed", f"{name} answers {text} ({code})", "`strata doctor` reports more"
    )


def load_binding(system: str = "linux") -> Binding:
    """Import CuPy and open the driver's library. Raises DeviceError where one is missing."""
    try:
        runtime, modules, compiler = (
            getattr(import_module("cupy.cuda"), name) for name in ("runtime", "driver", "nvrtc")
        )
    except ImportError as error:
        raise DeviceError(
            "CuPy is not installed, or cannot be loaded",
            str(error),
            "pip install 'strata-cuda[cuda13]', or [cuda12] for a driver of CUDA 12",
        ) from error
    return Binding(runtime, modules, compiler, open_driver(LIBRARIES[system]))


def open_driver(names: tuple[str, ...]) -> ctypes.CDLL:
    """The driver's library, the first that opens. Raises DeviceError where none does."""
    problems = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
            continue
        library.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        ]
        # the configuration, the kernel, no list of arguments, the packed block
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        return library
    raise DeviceError(
        "the NVIDIA driver's library cannot be opened",
        "; ".join(problems),
        "install the NVIDIA driver; `strata doctor` shows what this machine has",
    )
