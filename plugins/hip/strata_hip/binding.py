"""The Python binding of the HIP runtime, and the one place where its answers are checked.

hip-python is `rocm.bindings` from version 10 on and was `hip` before. It opens the real library at
the first call of a function, so a missing library or symbol shows there, as a RuntimeError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from attrs import frozen

from strata_core.errors import DeviceError, Refused

PACKAGES = ("rocm.bindings", "hip")
"""Where the binding's modules `hip` and `hiprtc` are, newest first."""

OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED = 2, 304, 801
"""hipErrorOutOfMemory, hipErrorOperatingSystem, hipErrorNotSupported."""

MATCHING = "install hip-python in ROCm's own version, or a newer ROCm"

NO_DEVICE_HINT = (
    "check that the GPU is passed through, and not hidden by HIP_VISIBLE_DEVICES or "
    "ROCR_VISIBLE_DEVICES"
)

REMEDIES = {
    3: "check that the amdgpu driver works: `rocminfo` lists what it offers",
    35: "update the amdgpu kernel driver, or install the ROCm that it is for",
    100: NO_DEVICE_HINT,
}
"""Hints by status: not initialised, a driver that is too old, no device."""

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

    @property
    def fills_properties(self) -> bool:
        """Whether hipGetDeviceProperties fills an object that it is given, as before version 10."""
        return self.package == "hip"

    def call(
        self,
        verb: str,
        function: Callable[..., Any],
        *args: Any,
        refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
    ) -> Any:
        """Call a function of the binding and return what follows its status.

        That is None, one value, or a tuple. `verb` says what was wanted, in words. Raises Refused
        for a status of `refusals`, else DeviceError.
        """
        return checked(verb, function, *args, refusals=refusals)


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


def first_of(answer: Any) -> Any:
    """The status of a call: the first of what it returns."""
    return answer[0] if isinstance(answer, tuple) else answer


def answer_of(verb: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the binding returns, its status first. Raises DeviceError.

    The binding raises where the library does not open, lacks the function, or answers a status
    that the binding has no name for.
    """
    name = name_of(function)
    try:
        return function(*args)
    except RuntimeError as error:
        raise _unloaded(verb, name, str(error)) from error
    except ValueError as error:
        raise DeviceError(f"{verb} failed", f"{name}: {error}", MATCHING) from error


def name_of(function: Callable[..., Any]) -> str:
    """A function's name, for messages."""
    return getattr(function, "__name__", "a function")


def checked(
    verb: str,
    function: Callable[..., Any],
    *args: Any,
    refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
) -> Any:
    """The values behind a call's status. Raises Refused or DeviceError; see `Binding.call`."""
    return judged(verb, name_of(function), answer_of(verb, function, *args), refusals)


def judged(verb: str, name: str, answer: Any, refusals: tuple[int, ...] = (OUT_OF_MEMORY,)) -> Any:
    """What follows the status in a function's answer. Raises as `checked` does."""
    status, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(status):
        raise _failure(verb, name, status, refusals)
    return values[0] if len(values) == 1 else tuple(values) if values else None


def _failure(verb: str, function: str, status: Any, refusals: tuple[int, ...]) -> DeviceError:
    """The error of a call whose status was not success."""
    code = int(status)
    why = f"{function} answers {getattr(status, 'name', code)} ({code})"
    if code == OUT_OF_MEMORY and OUT_OF_MEMORY in refusals:
        return Refused(f"{verb}: out of memory", why, "free memory of that kind, or ask for less")
    if code in refusals:
        return Refused(f"{verb}: refused", why, "raise the limit of locked memory (`ulimit -l`)")
    return DeviceError(f"{verb} failed", why, REMEDIES.get(code, "`strata doctor` reports more"))


def _unloaded(verb: str, function: str, text: str) -> DeviceError:
    """The error of a library that does not open or lacks a function."""
    symbol = re.search(r"dlsym '?b?'?(\w+)", text)
    if symbol:
        return DeviceError(
            f"{verb} failed: the HIP library lacks {symbol.group(1)}",
            f"it is older than the binding: {text}",
            MATCHING,
        )
    if "dlopen" in text:
        return DeviceError(f"{verb} failed: no HIP library", text, NO_LIBRARY_HINT)
    return DeviceError(f"{verb} failed", f"{function}: {text}", "`strata doctor` reports more")
