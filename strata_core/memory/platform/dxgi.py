"""What Windows lets each adapter share of host memory, asked of DXGI.

The budget of the non-local segment is what an adapter may have of host memory; page-locked memory
counts there, and a segment that is nearly full slows every use of it. Sources: dxgi.h and
dxgi1_4.h (order of the methods, interface identifiers), Microsoft's reference of
IDXGIAdapter3::QueryVideoMemoryInfo.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from uuid import UUID

from strata_core.memory.platform import SharedRoom

FACTORY = UUID("770aae78-f26f-4dba-a829-253c83d1b387")
"""IDXGIFactory1."""
ADAPTER = UUID("645967a4-1392-4310-a798-8053ce3e93fd")
"""IDXGIAdapter3."""

QUERY_INTERFACE, RELEASE = 0, 2
ENUMERATE_ADAPTERS, DESCRIBE, QUERY_MEMORY = 12, 10, 14
"""Places in the tables of IDXGIFactory1, IDXGIAdapter1 and IDXGIAdapter3."""

SHARED_SEGMENT = 1
SOFTWARE = 2
_MOST_ADAPTERS = 64


class Description(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = [
        ("name", ctypes.c_uint16 * 128),
        ("ids", ctypes.c_uint32 * 4),
        ("dedicated_video", ctypes.c_size_t),
        ("dedicated_system", ctypes.c_size_t),
        ("shared", ctypes.c_size_t),
        ("luid", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    ]


class MemoryInfo(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO."""

    _fields_ = [
        ("budget", ctypes.c_uint64),
        ("usage", ctypes.c_uint64),
        ("for_reservation", ctypes.c_uint64),
        ("reservation", ctypes.c_uint64),
    ]


def read_rooms(library: Callable[[str], Any]) -> tuple[SharedRoom, ...] | None:
    """The shared memory of every hardware adapter; None where DXGI does not answer.

    `library` loads a system library by its name.
    """
    try:
        create = library("dxgi").CreateDXGIFactory1
    except (OSError, AttributeError):
        return None
    factory = ctypes.c_void_p()
    if _failed(create(_identifier(FACTORY), ctypes.byref(factory))) or not factory.value:
        return None
    try:
        rooms = [room for index in range(_MOST_ADAPTERS) for room in _room(factory.value, index)]
    finally:
        _call(factory.value, RELEASE)
    return tuple(rooms) or None


def _room(factory: int, index: int) -> list[SharedRoom]:
    """The room of adapter `index`, if there is such an adapter and it is hardware."""
    adapter = ctypes.c_void_p()
    status = _call(factory, ENUMERATE_ADAPTERS, ctypes.c_uint32(index), ctypes.byref(adapter))
    if _failed(status) or not adapter.value:
        return []
    try:
        description = Description()
        if _failed(_call(adapter.value, DESCRIBE, ctypes.byref(description))):
            return []
        if description.flags & SOFTWARE:
            return []
        info = _memory(adapter.value)
    finally:
        _call(adapter.value, RELEASE)
    if info is None:
        return []
    name = bytes(description.name).decode("utf-16-le").partition("\0")[0]
    return [SharedRoom(name, info.budget, info.usage)]


def _memory(adapter: int) -> MemoryInfo | None:
    newer = ctypes.c_void_p()
    status = _call(adapter, QUERY_INTERFACE, _identifier(ADAPTER), ctypes.byref(newer))
    if _failed(status) or not newer.value:
        return None
    try:
        info = MemoryInfo()
        node, segment = ctypes.c_uint32(0), ctypes.c_uint32(SHARED_SEGMENT)
        failed = _failed(_call(newer.value, QUERY_MEMORY, node, segment, ctypes.byref(info)))
    finally:
        _call(newer.value, RELEASE)
    return None if failed else info


def _identifier(uuid: UUID) -> Any:
    return ctypes.create_string_buffer(uuid.bytes_le, 16)


def _failed(status: int) -> bool:
    return ctypes.c_int32(status).value < 0


def _call(this: int, place: int, *args: Any) -> int:
    """Call a method of a COM object. 64-bit Windows has one calling convention."""
    table = ctypes.cast(this, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    plain = [
        arg if isinstance(arg, ctypes.c_uint32) else ctypes.cast(arg, ctypes.c_void_p)
        for arg in args
    ]
    kinds = [type(arg) for arg in plain]
    method = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(table[place] or 0)
    return int(method(this, *plain))
