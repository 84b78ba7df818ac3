"""A clock that compiled code can read, and calls of the system's functions by their address."""

from __future__ import annotations

import ctypes
import sys

from attrs import frozen
from llvmlite import ir

from strata_core.kernels.cpu.emit import I32, I64, POINTER, Emit, V
from strata_core.kernels.cpu.target import Target


@frozen
class Clock:
    """A monotonic clock that compiled code can read: a system function and its argument.

    `ticks` is the number of ticks in a second.
    """

    function: int
    number: int
    ticks: int


def host_clock() -> Clock:
    """The system's monotonic clock."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        frequency = ctypes.c_int64()
        kernel.QueryPerformanceFrequency(ctypes.byref(frequency))
        return Clock(_address(kernel.QueryPerformanceCounter), 0, frequency.value)
    import time

    function = ctypes.CDLL(None).clock_gettime
    return Clock(_address(function), time.CLOCK_MONOTONIC, 1_000_000_000)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def emit_now(e: Emit, target: Target, function: V, number: V) -> V:
    """Ticks of the clock with this function and argument."""
    cell = e.scratch(16)
    if "windows" in target.triple or "win32" in target.triple:
        emit_call(e, function, (cell, POINTER))
        return e.load(I64, cell, align=8)
    emit_call(e, function, (number, I32), (cell, POINTER))
    return e.load(I64, cell, align=8) * 1_000_000_000 + e.load(I64, cell, 8, align=8)


def emit_call(e: Emit, function: V, *args: tuple[V, ir.Type]) -> V:
    """The int32 that a C function at an address returns; pointers are given as integers."""
    kind = ir.FunctionType(I32, [t for _, t in args])
    values = [e.b.inttoptr(v.raw, t) if t is POINTER else v.trunc(t).raw for v, t in args]
    return V(e, e.b.call(e.b.inttoptr(function.raw, kind.as_pointer()), values))
