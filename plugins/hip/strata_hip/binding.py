"""The Python binding of the HIP runtime, and the one place where its answers are checked.

hip-python is `rocm.bindings` from version 10 on and was `hip` before. It opens the real library at
the first call of a function, so a missing library or symbol shows there, as a RuntimeError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from attrs import frozen

from strata_core.errors import DeviceError, Refused

PACKAGES = ("rocm.bindings", "hip")
"""Where the binding's modules `hip` and `hiprtc` are, newest first."""

OUT_OF_MEMORY = 2
"""hipErrorOutOfMemory."""

NO_LIBRARY_HINT = (
    "install ROCm; where it is not in /opt/rocm, set ROCM_PATH to its folder: the binding opens "
    "ROCM_PATH/lib/libamdhip64.so, without a version"
)


@frozen
class Binding:
    """The binding's two modules, and the package that they are from."""

    hip: Any
    hiprtc: Any
    package: str

    def call(self, verb: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the binding and return what follows its status.

        That is None, one value, or a tuple. `verb` says what was wanted, in words. Raises Refused
        where memory ran out, else DeviceError.
        """
        return checked(verb, function, *args)


def load_binding() -> Binding:
    """Import the binding; the real library stays closed. Raises DeviceError."""
    for package in PACKAGES:
        try:
            return Binding(
                import_module(f"{package}.hip"), import_module(f"{package}.hiprtc"), package
            )
        except ImportError:
            continue
    raise DeviceError(
        "hip-python is not installed",
        f"there is neither a module {' nor '.join(PACKAGES)}",
        "pip install hip-python",
    )


def checked(verb: str, function: Callable[..., Any], *args: Any) -> Any:
    """The values behind a call's status. Raises Refused or DeviceError; see `Binding.call`."""
    name = getattr(function, "__name__", "a function")
    try:
        answer = function(*args)
    except RuntimeError as error:
        raise _unloaded(verb, name, str(error)) from error
    status, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(status):
        raise failure(verb, name, int(status), getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else tuple(values) if values else None


def failure(verb: str, function: str, code: int, name: str) -> DeviceError:
    """The error of a call whose status was not success."""
    if code == OUT_OF_MEMORY:
        return Refused(
            f"{verb}: out of memory",
            f"{function} answers {name} ({code})",
            "free memory of that kind, or ask for less",
        )
    return DeviceError(
        f"{verb} failed", f"{function} answers {name} ({code})", "`strata doctor` reports more"
    )


def _unloaded(verb: str, function: str, text: str) -> DeviceError:
    """The error of a library that does not open or lacks a function."""
    symbol = re.search(r"dlsym '?b?'?(\w+)", text)
    if symbol:
        return DeviceError(
            f"{verb} failed: the HIP library lacks {symbol.group(1)}",
            f"it is older than the binding: {text}",
            "install hip-python in ROCm's own version, or a newer ROCm",
        )
    if "dlopen" in text:
        return DeviceError(f"{verb} failed: no HIP library", text, NO_LIBRARY_HINT)
    return DeviceError(f"{verb} failed", f"{function}: {text}", "`strata doctor` reports more")


def opened_library(binding: Binding, maps: Path = Path("/proc/self/maps")) -> str:
    """Path of the library that the binding opened. Raises DeviceError where there is none.

    Another copy of it than the binding's would be another runtime with handles of its own.
    """
    with suppress(DeviceError):  # a call that opens it; what it answers is another's matter
        binding.call("count devices", binding.hip.hipGetDeviceCount)
    for line in maps.read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if "amdhip64" in Path(path).name:
            return path
    raise DeviceError(
        "the HIP library cannot be found in this process",
        "the binding answers, but no file named libamdhip64 is mapped",
        "tell its authors, with the output of `strata doctor --json`",
    )
