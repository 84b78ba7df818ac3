"""A Windows machine's facts, asked of the system's libraries through ctypes.

Every question may go unanswered: a fact that the system does not give stays at its default.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from typing import Any

from strata_core.machine.fields import Adapter
from strata_core.machine.linux import architecture
from strata_core.machine.record import Machine

# winnt.h: PF_* numbers of IsProcessorFeaturePresent, under the names that Linux uses.
_FEATURES = {38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f"}
_RELATION_PROCESSOR_CORE = 0


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("page_file_total", ctypes.c_uint64),
        ("page_file_available", ctypes.c_uint64),
        ("virtual_total", ctypes.c_uint64),
        ("virtual_available", ctypes.c_uint64),
        ("extended_available", ctypes.c_uint64),
    ]


class _ProcessorRelation(ctypes.Structure):
    """SYSTEM_LOGICAL_PROCESSOR_INFORMATION of winnt.h."""

    _fields_ = [
        ("mask", ctypes.c_size_t),
        ("relation", ctypes.c_int),
        ("rest", ctypes.c_uint64 * 2),
    ]


class _DisplayDevice(ctypes.Structure):
    """DISPLAY_DEVICEW of wingdi.h."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("name", ctypes.c_wchar * 32),
        ("string", ctypes.c_wchar * 128),
        ("flags", ctypes.c_uint32),
        ("id", ctypes.c_wchar * 128),
        ("key", ctypes.c_wchar * 128),
    ]


def read_windows() -> Machine:
    """The facts that Windows gives. Cores and affinity are those of this processor group."""
    libraries = getattr(ctypes, "windll", None)
    kernel32 = getattr(libraries, "kernel32", None)
    user32 = getattr(libraries, "user32", None)
    installed, available = memory(kernel32)
    allowed = affinity(kernel32)
    logical = allowed.bit_count() or os.cpu_count() or 1
    return Machine(
        os="windows",
        release=platform.version(),
        architecture=architecture(platform.machine()),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        logical_cores=logical,
        physical_cores=physical_cores(kernel32, allowed) or logical,
        ram_installed=installed,
        ram_available=available,
        page_size=mmap.PAGESIZE,
        cpu_model=platform.processor(),
        cpu_flags=features(kernel32),
        adapters=adapters(user32),
    )


def memory(kernel32: Any) -> tuple[int, int]:
    """(installed, available) bytes of RAM; one page each where Windows does not say."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if kernel32 is None or not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return mmap.PAGESIZE, mmap.PAGESIZE
    return int(status.total), int(status.available)


def affinity(kernel32: Any) -> int:
    """The mask of processors that this process may use; 0 where Windows does not say."""
    if kernel32 is None:
        return 0
    process, system = ctypes.c_size_t(), ctypes.c_size_t()
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel32.GetCurrentProcess())
    if not kernel32.GetProcessAffinityMask(handle, ctypes.byref(process), ctypes.byref(system)):
        return 0
    return process.value


def physical_cores(kernel32: Any, allowed: int) -> int:
    """Cores with a processor in the mask `allowed` (0: all); 0 where Windows does not say."""
    if kernel32 is None:
        return 0
    nbytes = ctypes.c_uint32()
    kernel32.GetLogicalProcessorInformation(None, ctypes.byref(nbytes))
    count = nbytes.value // ctypes.sizeof(_ProcessorRelation)
    table = (_ProcessorRelation * count)()
    if not count or not kernel32.GetLogicalProcessorInformation(table, ctypes.byref(nbytes)):
        return 0
    cores = [item.mask for item in table if item.relation == _RELATION_PROCESSOR_CORE]
    return sum(1 for mask in cores if not allowed or mask & allowed)


def features(kernel32: Any) -> tuple[str, ...]:
    """Names of the processor features that Windows can be asked for."""
    if kernel32 is None:
        return ()
    asked = kernel32.IsProcessorFeaturePresent
    return tuple(sorted(name for number, name in _FEATURES.items() if asked(number)))


def adapters(user32: Any) -> tuple[Adapter, ...] | None:
    """Display adapters with PCI ids, each once; compute-only ones are not listed by Windows."""
    if user32 is None:
        return None
    found: dict[Adapter, None] = {}
    for index in range(256):
        device = _DisplayDevice(size=ctypes.sizeof(_DisplayDevice))
        if not user32.EnumDisplayDevicesW(None, index, ctypes.byref(device), 0):
            break
        ids = re.search(r"VEN_([0-9A-F]{4})&DEV_([0-9A-F]{4})", device.id, re.IGNORECASE)
        if ids:
            found[Adapter(f"0x{ids[1].lower()}", f"0x{ids[2].lower()}")] = None
    return tuple(found)
