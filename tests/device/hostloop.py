"""Compiled loops that launch rounds and answer doorbells: no Python, no GIL, every wait bounded.

The driver's `cuGraphLaunch` is taken from the driver library by ctypes and called from numba code
as a plain function pointer; shared words are read and written by atomic instructions (an ordinary
polling loop would be hoisted).
"""

from __future__ import annotations

import ctypes

import numba as nb
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WAIT_NS = 2_000_000_000
"""A wait on the device that lasts longer is an error."""
DEVICE_LIBRARY = "libcuda.so.1"

libc = ctypes.CDLL(None)
clock_gettime = libc.clock_gettime
clock_gettime.argtypes = [ctypes.c_int, ctypes.c_size_t]
clock_gettime.restype = ctypes.c_int


@intrinsic
def load_acquire(typingctx, address):
    """The 32-bit word at `address`, ordered before everything after it."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(32)))
        return builder.load_atomic(pointer, "acquire", 4)

    return types.uint32(types.uintp), build


@intrinsic
def store_release(typingctx, address, value):
    """Write the 32-bit word at `address`, ordered after everything before it."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(32)))
        builder.store_atomic(args[1], pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uint32), build


@nb.njit(nogil=True)
def now(cell):
    """Nanoseconds of the monotonic clock; `cell` is an int64 [2] of scratch."""
    clock_gettime(nb.int32(1), nb.uintp(cell.ctypes.data))
    return cell[0] * 1_000_000_000 + cell[1]


@nb.njit(nogil=True)
def await_word(address, value, cell):
    """Spin until the word reaches `value` (wrapping); False when it takes longer than WAIT_NS."""
    end = now(cell) + WAIT_NS
    while True:
        for _ in range(256):
            if nb.int32(load_acquire(nb.uintp(address)) - nb.uint32(value)) >= 0:
                return True
        if now(cell) > end:
            return False


@nb.njit(nogil=True)
def busy_for(ns, cell):
    """Stand in for the CPU lane's work on a layer."""
    end = now(cell) + ns
    while ns > 0 and now(cell) < end:
        pass


def loops(launch):
    """(steps, doorbell) that launch graphs through `launch(graph, stream) -> code`.

    Both run `rounds` rounds from number `first` on and fill out[r] = (round ns, ns inside launch
    calls); they return 0, or where a wait or a launch failed (negative). `work` is the time in ns
    that a CPU lane would take for each layer.
    """

    @nb.njit(nogil=True)
    def steps(graphs, stream, lines, work, done, first, rounds, out, cell):
        """One graph a segment; segment s + 1 is launched when line s is published."""
        count = graphs.size
        for r in range(rounds):
            number = nb.uint32(first + r)
            start, busy = now(cell), 0
            for s in range(count):
                a = now(cell)
                if launch(nb.uintp(graphs[s]), nb.uintp(stream)) != 0:
                    return -1000 - s
                busy += now(cell) - a
                if s < count - 1:
                    if not await_word(lines + s * 64, number, cell):
                        return -1 - s
                    busy_for(work, cell)
            if not await_word(done, number, cell):
                return -500
            out[r, 0], out[r, 1] = now(cell) - start, busy
        return 0

    @nb.njit(nogil=True)
    def doorbell(
        graph, stream, lines, work, answers, layers, fixed, stop, done, first, rounds, out, cell
    ):
        """One graph a round; every published line is answered (with 1 where `fixed`), but not
        those from `stop` on.
        """
        for r in range(rounds):
            number = nb.uint32(first + r)
            if fixed:
                for s in range(layers):
                    store_release(nb.uintp(answers + s * 64), nb.uint32(0))
            start = now(cell)
            if launch(nb.uintp(graph), nb.uintp(stream)) != 0:
                return -1000
            busy = now(cell) - start
            for s in range(min(layers, stop)):
                if not await_word(lines + s * 64, number, cell):
                    return -1 - s
                busy_for(work, cell)
                store_release(nb.uintp(answers + s * 64), nb.uint32(1) if fixed else number)
            if not await_word(done, number, cell):
                return -500
            out[r, 0], out[r, 1] = now(cell) - start, busy
        return 0

    return steps, doorbell


def driver():
    """The driver library, with the entry points that these programs call."""
    library = ctypes.CDLL(DEVICE_LIBRARY)
    library.cuGraphLaunch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.cuGraphLaunch.restype = ctypes.c_int
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        call = getattr(library, name)
        call.argtypes = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        call.restype = ctypes.c_int
    return library
