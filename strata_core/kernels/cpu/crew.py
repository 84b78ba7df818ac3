"""The compiled loop that every thread of the pool runs: phases of steps, shared out among them.

A phase is a list of steps. In a `together` phase the units of the steps are one range, and a thread
that has a part of it runs every step on each unit, in order. In a `side by side` phase the units of
the steps follow one another, and no step reads what another one writes. In a `leader` phase the
leader runs the steps, in order, and nobody else does anything. All threads finish a phase before
any begins the next. A phase may name a word and a number of phases that are left out after it where
the word is 0 by then; nothing may write that word again in the same round.

A thread's first unit is its own, and then it claims neighbours: at first several, fewer and fewer
as the phase goes on, at last single ones. So a thread begins at once and reads long runs, a claim
(which moves a cache line from processor to processor) is rare, and one that is slow or held up has
little that the others wait for.

Who comes last to the end of a phase tells the others by a word that is written for that alone:
those who wait look at no line that those who come still write.

Memory layout, in int64 words. Step: function, arguments, address of the number of units, 0. Phase:
steps, number of steps, its kind, address of the word or 0, number of phases left out, unused words
to the end of the line; in a line to itself the number of units claimed, 0 between rounds. The
crew's own words are those of `WORDS`, one a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from strata_core.kernels.cpu.clock import emit_now
from strata_core.kernels.cpu.emit import I32, I64, VOID, Emit, V, Var
from strata_core.kernels.cpu.steps import STEP_TYPE
from strata_core.kernels.cpu.target import Target

LINE = 64
STEP_WORDS, PHASE_WORDS = 4, 16

UNLESS, LEAVES_OUT = 3, 4
"""Words of a phase."""

SHARES = 16
"""Claims that what is left of a phase is enough for, for each thread."""

CLAIMED = 64
"""Where a phase has its count of claimed units, in bytes."""

TOGETHER, SIDE_BY_SIDE, LEADER = 0, 1, 2
"""Kinds of phases."""

WORDS = (
    *("round", "phases", "count", "arrived", "over", "base", "threads", "stop", "yield"),
    *("clock", "clock_id", "patience"),
)
"""`round`: rounds begun so far; `phases`, `count`: what this round runs; `arrived`: how often a
thread has finished a phase or a round, ever; `over`: what that was when all had finished the last
one; `base`: what it was when the round began; `threads`: size of the crew, the leader included;
`stop`: 1 when it is to end; `yield`: address of the system's function that gives the processor
away, or 0; `clock`, `clock_id`: see `clock.Clock`; `patience`: its ticks after which a thread
without work goes to sleep."""

PARKED = len(WORDS)
"""Line of thread 0; each thread has one: a word that says whether it sleeps, one that says that
the leader must wake it. Thread 0 is the leader."""

SPINS = 128
"""Looks at a word before the processor is given away between looks."""

PATIENCE = 0.005
"""Seconds without work after which a thread goes to sleep.

Seconds, not looks: on a busy machine each look gives the processor away for a long time, and
thousands of them would keep all threads awake for minutes.
"""

STOPPED = -1
"""What `serve` returns when the crew ends."""


def _word(crew: V, name: str) -> V:
    return crew + WORDS.index(name) * LINE


def pause(e: Emit, target: Target) -> None:
    """Tell the processor that this thread waits for a word."""
    instruction = {"x86_64": "pause", "aarch64": "isb"}.get(target.triple.split("-")[0])
    if instruction:
        e.b.asm(ir.FunctionType(VOID, []), instruction, "~{memory}", [], side_effect=True)


def _look_again(e: Emit, target: Target, crew: V, looks: Var) -> None:
    """Between two looks at a word: pause, and after many looks let others run."""
    looks.set(looks.get() + 1)
    pause(e, target)
    give_way = e.load(I64, _word(crew, "yield"), align=8)
    long = (looks.get() > SPINS) & give_way.compare("!=", 0)
    with e.when(long):
        e.call_address(give_way, ir.FunctionType(I32, []))


@contextmanager
def _function(module: ir.Module, name: str, result: ir.Type, args: int) -> Iterator[Emit]:
    yield Emit(module, ir.Function(module, ir.FunctionType(result, [I64] * args), name))


def emit_crew(module: ir.Module, target: Target) -> None:
    """`begin(crew)`, `lead(crew)`, `serve(crew, index, seen)`: `pool.py` says who calls them.

    `run_step(function, args, begin, end)` runs one step on the calling thread alone.
    """
    _emit_phases(module, target)
    with _function(module, "begin", I64, 1) as e:
        _begin(e)
    with _function(module, "lead", VOID, 1) as e:
        e.call("run_phases", VOID, e.args[0], e.i64(0))
        e.finish()
    with _function(module, "run_step", VOID, 4) as e:
        before = _set_control_word(e, target)
        e.call_address(e.args[0], STEP_TYPE, *e.args[1:])
        _restore_control_word(e, before)
        e.finish()
    with _function(module, "serve", I64, 3) as e:
        _serve(e, target)


def _begin(e: Emit) -> None:
    """Start a round; the number of threads that sleep, each with its second word set to 1."""
    crew = e.args[0]
    e.store(e.load_acquire(_word(crew, "arrived")), _word(crew, "base"), align=8)
    e.fetch_add(_word(crew, "round"), 1)
    asleep = e.var(I64, 0)
    with e.loop(1, e.load(I64, _word(crew, "threads"), align=8)) as index:
        parked = crew + (index + PARKED) * LINE
        sleeps = e.exchange(parked, 0)
        e.store(sleeps, parked, 8, align=8)
        asleep.set(asleep.get() + sleeps)
    e.finish(asleep.get())


def _serve(e: Emit, target: Target) -> None:
    """Run rounds; return the last round seen when it is time to sleep, STOPPED at the end."""
    crew, index, start = e.args
    parked = crew + (index + PARKED) * LINE
    seen, looks, since = e.var(I64, start), e.var(I64, 0), e.var(I64, 0)
    with e.forever():
        begun = e.load_acquire(_word(crew, "round")).compare("!=", seen.get())
        with e.b.if_else(begun.raw) as (busy, idle):
            with busy:
                seen.set(seen.get() + 1)
                with e.when(e.load(I64, _word(crew, "stop"), align=8).compare("!=", 0)):
                    e.finish(e.i64(STOPPED))
                e.call("run_phases", VOID, crew, index)
                looks.set(0)
                since.set(0)
            with idle:
                _look_again(e, target, crew, looks)
                with e.when(_idle_for_long(e, target, crew, looks, since)):
                    e.exchange(parked, 1)
                    latest = e.load_acquire(_word(crew, "round"), "seq_cst")
                    missed = latest.compare("!=", seen.get())
                    with e.when(missed ^ True):
                        e.finish(seen.get())
                    # a round began meanwhile; if the leader took the word it is waking this thread
                    with e.when(e.exchange(parked, 0).compare("==", 0)):
                        e.finish(seen.get())
                    looks.set(0)
                    since.set(0)
    e.b.unreachable()


def _idle_for_long(e: Emit, target: Target, crew: V, looks: Var, since: Var) -> V:
    """Whether the patience is over, by the clock, which is read after the first looks alone."""
    waited = e.var(I64, 0)
    with e.when(looks.get() > SPINS):
        clock, number = (e.load(I64, _word(crew, w), align=8) for w in ("clock", "clock_id"))
        now = emit_now(e, target, clock, number)
        with e.when(since.get().compare("==", 0)):
            since.set(now)
        waited.set(now - since.get())
    return waited.get() > e.load(I64, _word(crew, "patience"), align=8)


def _emit_phases(module: ir.Module, target: Target) -> None:
    """`run_phases(crew, index)`: a thread's part of a round; returns when all are done."""
    function = ir.Function(module, ir.FunctionType(VOID, [I64, I64]), "run_phases")
    function.linkage = "internal"
    function.attributes.add("noinline")
    e = Emit(module, function)
    before = _set_control_word(e, target)
    crew, index = e.args
    phases = e.load(I64, _word(crew, "phases"), align=8)
    threads = e.load(I64, _word(crew, "threads"), align=8)
    base = e.load(I64, _word(crew, "base"), align=8)
    count = e.load(I64, _word(crew, "count"), align=8)
    leads = index.compare("==", 0)
    number, done = e.var(I64, 0), e.var(I64, 0)
    with e.forever() as leave_if_last:
        leave_if_last(number.get() >= count)
        phase = phases + number.get() * (8 * PHASE_WORDS)
        kind = e.load(I64, phase, 16, align=8)
        with e.when(kind.compare("==", TOGETHER)):
            _share(e, phase, (index, threads), _together)
        with e.when(kind.compare("==", SIDE_BY_SIDE)):
            _share(e, phase, (index, threads), _side_by_side)
        with e.when(kind.compare("==", LEADER) & leads):
            _in_order(e, phase)
        done.set(done.get() + 1)
        all_here = base + done.get() * threads
        last = _arrive(e, crew, all_here)
        with e.when(last & kind.compare("!=", LEADER)):
            # nobody claims any more; the next round finds it as this one did
            e.store(e.i64(0), phase, CLAIMED, align=8)
        with e.when(last ^ True):
            _await_all(e, target, crew, all_here)
        number.set(number.get() + 1 + _left_out(e, phase))
    # whoever began the round may free its schedule at once: not before all have looked at it
    all_here = base + (done.get() + 1) * threads
    last = _arrive(e, crew, all_here)
    with e.when(leads & (last ^ True)):
        _await_all(e, target, crew, all_here)
    _restore_control_word(e, before)
    e.finish()


def _arrive(e: Emit, crew: V, all_here: V) -> V:
    """This thread is done with a phase; whether all are, which it then tells the others."""
    last = (e.fetch_add(_word(crew, "arrived"), 1) + 1).compare("==", all_here)
    with e.when(last):
        e.store_release(all_here, _word(crew, "over"))
    return last


def _await_all(e: Emit, target: Target, crew: V, wanted: V) -> None:
    """Wait until all have arrived `wanted` times."""
    looks = e.var(I64, 0)
    with e.forever() as leave_if:
        leave_if(e.load_acquire(_word(crew, "over")) >= wanted)
        _look_again(e, target, crew, looks)


def _left_out(e: Emit, phase: V) -> V:
    """How many phases are left out after this one, now that all threads have finished it."""
    word, found = e.load(I64, phase, 8 * UNLESS, align=8), e.var(I64, 0)
    with (
        e.when(word.compare("!=", 0)),
        e.when(e.load_acquire(word).compare("==", 0)),
    ):
        found.set(e.load(I64, phase, 8 * LEAVES_OUT, align=8))
    return found.get()


ROUND_TO_NEAREST = 0x1F80
"""x86's control word: to nearest, denormals kept, no exceptions raised."""


def _set_control_word(e: Emit, target: Target) -> V | None:
    """Floats as docs/arithmetic.md wants them, whatever this thread had; where the old word is.

    Other libraries switch on flush-to-zero in the threads they run in, and new threads inherit it.
    Elsewhere than on x86 the system's default is already the right one.
    """
    if not target.triple.startswith("x86_64"):
        return None
    before, wanted = e.scratch(4, 4), e.scratch(4, 4)
    e.control_word("stmxcsr", before)
    e.store(e.const(I32, ROUND_TO_NEAREST), wanted, align=4)
    e.control_word("ldmxcsr", wanted)
    return before


def _restore_control_word(e: Emit, before: V | None) -> None:
    if before is not None:
        e.control_word("ldmxcsr", before)


def _call_step(e: Emit, step: V, first: V, last: V) -> None:
    function, args = e.load(I64, step, align=8), e.load(I64, step, 8, align=8)
    e.call_address(function, STEP_TYPE, args, first, last)


def _units(e: Emit, step: V) -> V:
    return e.load(I64, e.load(I64, step, 16, align=8), align=8)


def _share(e: Emit, phase: V, who: tuple[V, V], run: Callable[[Emit, V, V, V, V], None]) -> None:
    """A thread's own unit of a phase, and then those that it claims.

    `who` is its index and the number of threads; `run(e, steps, count, first, last)` runs units.
    """
    index, threads = who
    steps, count = e.load(I64, phase, align=8), e.load(I64, phase, 8, align=8)
    kind = e.load(I64, phase, 16, align=8)
    total = e.var(I64, _units(e, steps))
    with e.when(kind.compare("==", SIDE_BY_SIDE)), e.loop(1, count) as s:
        total.set(total.get() + _units(e, steps + s * (8 * STEP_WORDS)))
    units = total.get()
    first, last = e.var(I64, index), e.var(I64, e.smin(index + 1, units))
    with e.forever() as leave_if:
        leave_if(first.get() >= units)
        run(e, steps, count, first.get(), last.get())
        first.set(threads)
        # where every unit was somebody's first, there is nothing to claim
        with e.when(threads < units):
            # others may have claimed beyond the end: then nothing is left, not less than that
            left = e.smax(units - threads - e.load_acquire(phase + CLAIMED), e.i64(0))
            several = e.smax(left // (threads * SHARES), e.i64(1))
            first.set(threads + e.fetch_add(phase + CLAIMED, several))
            last.set(e.smin(first.get() + several, units))


def _together(e: Emit, steps: V, count: V, first: V, last: V) -> None:
    """Run all steps on each of these units."""
    with e.loop(first, last) as unit, e.loop(0, count) as s:
        _call_step(e, steps + s * (8 * STEP_WORDS), unit, unit + 1)


def _side_by_side(e: Emit, steps: V, count: V, first: V, last: V) -> None:
    """Run these units, each of which belongs to the step in whose range it falls."""
    before = e.var(I64, 0)
    with e.loop(0, count) as s:
        step = steps + s * (8 * STEP_WORDS)
        mine = _units(e, step)
        begin = e.smax(first - before.get(), e.i64(0))
        end = e.smin(last - before.get(), mine)
        with e.when(begin < end):
            _call_step(e, step, begin, end)
        before.set(before.get() + mine)


def _in_order(e: Emit, phase: V) -> None:
    """All units of every step, one step after the other, by the calling thread."""
    steps, count = e.load(I64, phase, align=8), e.load(I64, phase, 8, align=8)
    with e.loop(0, count) as s:
        step = steps + s * (8 * STEP_WORDS)
        _call_step(e, step, e.i64(0), _units(e, step))
