"""Steps by which a round asks for experts that have no address, and computes others meanwhile.

`ask` sorts the picks of a layer: experts whose addresses are in the table are computed now, the
others are written to the mailbox and announced by one byte in a pipe. `take` waits until some of
them have landed and makes those the picks to compute now. Whoever serves the mailbox writes the
addresses into the table; `serving.py` does.
"""

from __future__ import annotations

import ctypes
import sys

from llvmlite import ir

from strata_core.kernels.cpu.crew import SPINS, pause
from strata_core.kernels.cpu.elementwise import MOST_EXPERTS
from strata_core.kernels.cpu.emit import I32, I64, POINTER, Emit, V
from strata_core.kernels.cpu.steps import Args, step
from strata_core.kernels.cpu.target import Target

FAILED, LANDED, COUNT, LAYER, INDICES = 0, 8, 16, 17, 24
"""Words of a mailbox (int64), those that are waited for on cache lines of their own. FAILED: not 0
once a request of this round failed. LANDED: how many of the request's experts are in the table.
COUNT and LAYER of the request, and from INDICES on its experts, each once."""

MAILBOX_WORDS = INDICES + MOST_EXPERTS

ASK_ARGS = (
    "picks",
    "entries",
    "table",
    "now",
    "late",
    "left",
    "box",
    "layer",
    "send",
    "pipe",
)
"""`picks`: int32 by entry, negative where another lane computes; `entries`: address of their
number. `table`: uint64 [experts, 3], 0 where an expert has no address. `now`, `late`: int32 by
entry, written: the picks to compute now and those to wait for, -1 elsewhere. `left`: address of an
int64, written: how many experts are waited for. `send`, `pipe`: address of the system's `write`,
and the pipe that it announces requests in."""

TAKE_ARGS = ("late", "entries", "now", "left", "box", "least", "give_way")
"""`late`, `now`, `left` as in ASK_ARGS, changed: what landed moves from `late` to `now`. `least`:
how many experts of the request must have landed, at most all. After a failure nothing is late and
nothing is to be computed now."""

REQUEST = b"r"
"""The byte that announces a request."""


def emit_ask(module: ir.Module) -> None:
    """`ask`: one unit."""
    with step(module, "ask", ASK_ARGS) as (e, a, begin, end), e.when(begin < end):
        asked = e.scratch(4 * MOST_EXPERTS)
        e.clear(asked, e.i64(4 * MOST_EXPERTS))
        count = e.var(I64, 0)
        none = e.const(I32, -1)
        with e.loop(0, e.load(I64, a.entries, align=8)) as i:
            pick = e.load(I32, a.picks + i * 4)
            index = e.smax(pick.sext(I64), e.i64(0))
            there = e.load(I64, a.table + index * 24, align=8).compare("!=", 0)
            late = (pick >= 0) & (there ^ True)
            e.store(e.select(late, none, pick), a.now + i * 4)
            e.store(e.select(late, pick, none), a.late + i * 4)
            new = late & e.load(I32, asked + index * 4).compare("==", 0)
            with e.when(new):
                e.store(e.const(I32, 1), asked + index * 4)
                e.store(index, a.box + count.get() * 8, 8 * INDICES, align=8)
                count.set(count.get() + 1)
        e.store(count.get(), a.left, align=8)
        with e.when(count.get() > 0):
            _send(e, a, count.get())


def _send(e: Emit, a: Args, count: V) -> None:
    """Announce the request, unless one of this round failed: then nobody serves any more."""
    e.store(count, a.box, 8 * COUNT, align=8)
    e.store(a.layer, a.box, 8 * LAYER, align=8)
    e.store(e.i64(0), a.box, 8 * LANDED, align=8)
    with e.when(e.load_acquire(a.box + 8 * FAILED).compare("==", 0)):
        byte = e.scratch(8)
        e.store(e.i64(REQUEST[0]), byte, align=8)
        kind = ir.FunctionType(I64, [I32, POINTER, I64])
        function = e.b.inttoptr(a.send.raw, kind.as_pointer())
        where = e.b.inttoptr(byte.raw, POINTER)
        e.b.call(function, [a.pipe.trunc(I32).raw, where, e.i64(1).raw])


def emit_take(module: ir.Module, target: Target) -> None:
    """`take`: one unit, which returns when enough has landed or a request failed."""
    with step(module, "take", TAKE_ARGS) as (e, a, begin, end), e.when(begin < end):
        least = e.smin(e.load(I64, a.box, 8 * COUNT, align=8), a.least)
        looks, landed = e.var(I64, 0), e.var(I64, 0)
        with e.forever() as leave_if:
            landed.set(e.load_acquire(a.box + 8 * LANDED))
            leave_if(landed.get() >= least)
            leave_if(e.load_acquire(a.box + 8 * FAILED).compare("!=", 0))
            looks.set(looks.get() + 1)
            pause(e, target)
            long = (looks.get() > SPINS) & a.give_way.compare("!=", 0)
            with e.when(long):
                e.call_address(a.give_way, ir.FunctionType(I32, []))
        failed = e.load_acquire(a.box + 8 * FAILED).compare("!=", 0)
        there = e.scratch(4 * MOST_EXPERTS)
        e.clear(there, e.i64(4 * MOST_EXPERTS))
        with e.loop(0, landed.get()) as i:
            index = e.load(I64, a.box + i * 8, 8 * INDICES, align=8)
            e.store(e.const(I32, 1), there + index * 4)
        _move(e, a, there, failed)


def _move(e: Emit, a: Args, there: V, failed: V) -> None:
    """What landed is to be computed now; the rest stays late, or is given up."""
    left, none = e.var(I64, 0), e.const(I32, -1)
    with e.loop(0, e.load(I64, a.entries, align=8)) as i:
        pick = e.load(I32, a.late + i * 4)
        index = e.smax(pick.sext(I64), e.i64(0))
        came = e.load(I32, there + index * 4).compare("!=", 0) & (failed ^ True)
        e.store(e.select(came, pick, none), a.now + i * 4)
        late = e.select(came | failed, none, pick)
        e.store(late, a.late + i * 4)
        left.set(left.get() + (late >= 0).zext(I64))
    e.store(left.get(), a.left, align=8)


def write_function() -> int:
    """Address of the system's `write(int, const void *, size)`."""
    if sys.platform == "win32":
        function = ctypes.CDLL("ucrtbase")._write  # noqa: SLF001 - its name there
    else:
        function = ctypes.CDLL(None).write
    return ctypes.cast(function, ctypes.c_void_p).value or 0
