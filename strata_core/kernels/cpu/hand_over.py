"""Steps by which a round hands work to a device and takes it back, without the interpreter.

`launch` calls a driver's function by its address; `wait` looks at a word in page-locked memory
until the device has written the awaited number there, bounded by a clock; `answer` writes the
number into a word that the device waits for. The first failure is latched in a cell, and the later
steps of the round fall through; nothing falls to the CPU any more then.
"""

from __future__ import annotations

from llvmlite import ir

from strata_core.kernels.cpu.clock import emit_call, emit_now
from strata_core.kernels.cpu.crew import SPINS, pause
from strata_core.kernels.cpu.emit import I32, I64, POINTER, Emit, V
from strata_core.kernels.cpu.steps import step
from strata_core.kernels.cpu.target import Target

NO_FAILURE, LAUNCH_FAILED, TIMED_OUT = 0, 1, 2
"""First word of a failure cell (int64 [2]); the second is the label of the step that failed."""

LAUNCH_ARGS = ("launcher", "graph", "stream", "failure", "label")
"""`launcher`: address of `int32 launch(void *graph, void *stream)`. `failure`: address of the
cell."""

WAIT_ARGS = ("word", "wanted", "bound", "clock", "clock_id", "give_way", "failure", "label")
"""`word`: address of the int64 that the device writes; `wanted`: address of the number that it is
to become; `bound`: ticks of the clock to wait at most; `clock`, `clock_id`: see `clock.Clock`;
`give_way`: address of the system's function that gives the processor away, or 0."""

ANSWER_ARGS = ("word", "number", "failure")
"""`word`: address of the int64 that the device waits for; `number`: address of what it becomes."""

STAMP_ARGS = ("out", "clock", "clock_id")
"""`out`: address of an int64; `clock`, `clock_id`: see `clock.Clock`."""

TALLY_ARGS = ("picks", "entries", "out", "failure")
"""`picks`: int32 by entry; `entries`: address of their number; `out`: address of an int64 [2]: how
many are found, and 1 if any is, else 0."""

LOOKS = 256
"""Looks at a word between two looks at the clock."""


def emit_launch(module: ir.Module) -> None:
    """`launch`: one unit, which launches a graph unless something failed before."""
    with step(module, "launch", LAUNCH_ARGS) as (e, a, begin, end), e.when(begin < end):
        fine = e.load(I64, a.failure, align=8).compare("==", NO_FAILURE)
        with e.when(fine):
            code = emit_call(e, a.launcher, (a.graph, POINTER), (a.stream, POINTER))
            with e.when(code.compare("!=", 0)):
                _fail(e, a.failure, LAUNCH_FAILED, a.label)


def emit_wait(module: ir.Module, target: Target) -> None:
    """`wait`: one unit, which returns when the word has the wanted number, or after the bound."""
    with step(module, "wait", WAIT_ARGS) as (e, a, begin, end), e.when(begin < end):
        wanted = e.load(I64, a.wanted, align=8)
        looks, start = e.var(I64, 0), e.var(I64, 0)
        with e.forever() as leave_if:
            leave_if(e.load(I64, a.failure, align=8).compare("!=", NO_FAILURE))
            leave_if(e.load_acquire(a.word).compare("==", wanted))
            looks.set(looks.get() + 1)
            pause(e, target)
            with e.when((looks.get() % LOOKS).compare("==", 0)):
                now = emit_now(e, target, a.clock, a.clock_id)
                with e.when(start.get().compare("==", 0)):
                    start.set(now)
                # a number that came while this thread was held up has come in time
                missing = e.load_acquire(a.word).compare("!=", wanted)
                with e.when(((now - start.get()) > a.bound) & missing):
                    _fail(e, a.failure, TIMED_OUT, a.label)
            long = (looks.get() > SPINS) & a.give_way.compare("!=", 0)
            with e.when(long):
                e.call_address(a.give_way, ir.FunctionType(I32, []))


def emit_tally(module: ir.Module) -> None:
    """`tally`: one unit, which counts the picks that are not negative; none after a failure.

    The device may still be writing picks then.
    """
    with step(module, "tally", TALLY_ARGS) as (e, a, begin, end), e.when(begin < end):
        found = e.var(I64, 0)
        fine = e.load(I64, a.failure, align=8).compare("==", NO_FAILURE)
        entries = e.select(fine, e.load(I64, a.entries, align=8), e.i64(0))
        with e.loop(0, entries) as i:
            mine = e.load(I32, a.picks + i * 4) >= 0
            found.set(found.get() + mine.zext(I64))
        e.store(found.get(), a.out, align=8)
        e.store((found.get() > 0).zext(I64), a.out, 8, align=8)


def emit_stamp(module: ir.Module, target: Target) -> None:
    """`stamp`: one unit, which writes down what the clock says."""
    with step(module, "stamp", STAMP_ARGS) as (e, a, begin, end), e.when(begin < end):
        e.store(emit_now(e, target, a.clock, a.clock_id), a.out, align=8)


def emit_answer(module: ir.Module) -> None:
    """`answer`: one unit; what was written before is there for who sees the number."""
    with step(module, "answer", ANSWER_ARGS) as (e, a, begin, end), e.when(begin < end):
        fine = e.load(I64, a.failure, align=8).compare("==", NO_FAILURE)
        with e.when(fine):
            e.store_release(e.load(I64, a.number, align=8), a.word)


def _fail(e: Emit, cell: V, code: int, label: V) -> None:
    e.store(label, cell, 8, align=8)
    e.store(e.i64(code), cell, align=8)
