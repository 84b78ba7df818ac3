"""Queries of the CUDA driver through ctypes: no context, no CuPy, nothing left behind.

Source of names and numbers: the CUDA driver API's reference, sections Initialization, Version
Management and Device Management (CUdevice_attribute 16 is the number of multiprocessors, 75 and 76
are the compute capability).
"""

from __future__ import annotations

import ctypes
from typing import Any

_UNITS, _MAJOR, _MINOR = 16, 75, 76


class _Refused(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.call = call
        self.code = code


def ask_driver(library: str) -> dict[str, Any]:
    """What the driver says of itself and its devices, as JSON data.

    `code` is 0, or the CUresult of the call named in `call`, with its name in `error`; `version` as
    cuDriverGetVersion counts (12080 is 12.8), `devices` a list of `name`, `capability`
    ([major, minor]), `memory` (bytes) and `units`. `library` is what `Machine.find_library` found.
    Raises OSError if it cannot be loaded, AttributeError if it is no CUDA driver.
    """
    return read_driver(ctypes.CDLL(library))


def read_driver(driver: Any) -> dict[str, Any]:
    """`ask_driver` of a library that is loaded."""
    answer: dict[str, Any] = {"code": 0, "call": "", "error": "", "version": 0, "devices": []}
    try:
        _call(driver, "cuInit", 0)
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(driver, "cuDriverGetVersion", ctypes.byref(version))
        answer["version"] = version.value
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        answer["devices"] = [_device(driver, index) for index in range(count.value)]
    except _Refused as refused:
        answer |= {
            "code": refused.code,
            "call": refused.call,
            "error": _error_name(driver, refused.code),
        }
    return answer


def _device(driver: Any, index: int) -> dict[str, Any]:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    units, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory = ctypes.c_size_t()
    _call(driver, "cuDeviceGet", ctypes.byref(handle), index)
    _call(driver, "cuDeviceGetName", name, len(name), handle)
    for value, attribute in ((units, _UNITS), (major, _MAJOR), (minor, _MINOR)):
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    return {
        "name": name.value.decode("utf-8", "replace"),
        "capability": [major.value, minor.value],
        "memory": memory.value,
        "units": units.value,
    }


def _call(driver: Any, name: str, *arguments: Any) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise _Refused(name, code)


def _error_name(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
        return ""
    return text.value.decode("ascii", "replace")
