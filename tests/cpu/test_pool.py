"""The pool: every unit once, phases in order, sleeping and waking, many rounds in a row."""

import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from strata_core.errors import EngineError
from strata_core.kernels.cpu import pool as pools
from strata_core.kernels.cpu.crew import CLAIMED
from strata_core.kernels.cpu.emit import F32, I64
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.steps import step
from strata_core.kernels.cpu.target import host_target


@pytest.fixture(scope="module")
def compiler(cache):
    return Compiler(host_target(), cache, print)


@pytest.fixture(scope="module")
def code(compiler):
    """`count`: cells[u] += 1. `sum`: out[u] = sum of all cells, which the phase before wrote."""
    module = compiler.module("pool_test")
    with step(module, "count", ("cells",)) as (e, a, begin, end), e.loop(begin, end) as u:
        e.store(e.load(I64, a.cells + u * 8) + 1, a.cells + u * 8)
    with (
        step(module, "total", ("cells", "cells_count", "out")) as (e, a, begin, end),
        e.loop(begin, end) as u,
    ):
        total = e.var(I64, 0)
        with e.loop(0, a.cells_count) as i:
            total.set(total.get() + e.load(I64, a.cells + i * 8))
        e.store(total.get(), a.out + u * 8)
    return compiler.compile(module)


class Work:
    """Argument blocks and cells that outlive a schedule."""

    def __init__(self, code):
        self.code = code
        self.keep = []

    def words(self, *values):
        block = np.array(values, np.int64)
        self.keep.append(block)
        return block

    def step(self, name, units, *args):
        block = self.words(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in args])
        return StepCall(self.code.address(name), block.ctypes.data, self.words(units).ctypes.data)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_phases_see_all_that_earlier_ones_wrote(compiler, code, threads):
    work = Work(code)
    cells, more = np.zeros(37, np.int64), np.zeros(5, np.int64)
    totals = [np.zeros(3, np.int64) for _ in range(40)]
    phases = []
    for out in totals:
        count = work.step("count", 37, cells)
        phases.append(Phase((count, work.step("count", 5, more)), side_by_side=True))
        phases.append(Phase((work.step("total", 3, cells, 37, out),), side_by_side=False))
    schedule = Schedule.of(phases)
    pool = Pool(compiler, threads)
    try:
        for turn in range(1, 26):
            pool.run(schedule)
            assert (cells == 40 * turn).all()
            assert (more == 40 * turn).all()
            for k, out in enumerate(totals):
                assert out.tolist() == [37 * (40 * (turn - 1) + k + 1)] * 3
    finally:
        pool.close()


def test_steps_of_a_phase_run_in_order_on_each_unit(compiler, code):
    work = Work(code)
    cells, out = np.zeros(1, np.int64), np.zeros(1, np.int64)
    steps = (
        work.step("count", 1, cells),
        work.step("count", 1, cells),
        work.step("total", 1, cells, 1, out),
    )
    pool = Pool(compiler, 2)
    try:
        pool.run(Schedule.of([Phase(steps, side_by_side=False)]))
    finally:
        pool.close()
    assert out.tolist() == [2]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_who_finds_nothing_left_claims_no_more_than_one(compiler, threads, side_by_side):
    """The last unit waits until all other threads have claimed in vain, and notes what stands."""
    module = compiler.module("claims")
    with (
        step(module, "note", ("claimed", "out")) as (e, a, _begin, end),
        e.when(end > e.i64(threads)),
    ):
        with e.forever() as leave_if:
            leave_if(e.load_acquire(a.claimed) >= threads)
        e.store(e.load_acquire(a.claimed), a.out)
    work, out, words = Work(compiler.compile(module)), np.zeros(1, np.int64), np.zeros(2, np.int64)
    note = work.step("note", threads + 1)
    schedule = Schedule.of(
        [Phase((StepCall(note.function, words.ctypes.data, note.units),), side_by_side)]
    )
    words[:] = schedule.address + CLAIMED, out.ctypes.data
    pool = Pool(compiler, threads)
    try:
        pool.run(schedule)
    finally:
        pool.close()
    assert out.tolist() == [threads]


def test_workers_sleep_when_idle_and_wake_for_the_next_round(compiler, code):
    work = Work(code)
    cells = np.zeros(64, np.int64)
    schedule = Schedule.of([Phase((work.step("count", 64, cells),), side_by_side=True)])
    pool = Pool(compiler, 3)
    try:
        for turn in range(1, 6):
            pool.run(schedule)
            assert (cells == turn).all()
            deadline = time.monotonic() + 120
            while pool.asleep() < 2 and time.monotonic() < deadline:
                time.sleep(0.002)
            assert pool.asleep() == 2
            before = time.process_time()
            time.sleep(0.05)
            assert time.process_time() - before < 0.04
    finally:
        pool.close()


def test_workers_that_rarely_get_the_processor_fall_asleep_as_soon(compiler, code, monkeypatch):
    """As on a busy machine, where to give the processor away is to wait for long."""
    yields = []

    def give_way():
        yields.append(time.sleep(0.01))
        return 0

    slow = ctypes.CFUNCTYPE(ctypes.c_int)(give_way)
    address = ctypes.cast(slow, ctypes.c_void_p).value
    monkeypatch.setattr(pools, "yield_function", lambda: address)
    work, cells = Work(code), np.zeros(4, np.int64)
    pool = Pool(compiler, 2)
    try:
        pool.run(Schedule.of([Phase((work.step("count", 4, cells),), side_by_side=True)]))
        begin = len(yields)
        while pool.asleep() < 1:
            time.sleep(0.001)
        assert len(yields) - begin < 10
    finally:
        pool.close()
    assert cells.tolist() == [1] * 4


def test_rounds_that_begin_while_workers_fall_asleep(compiler, code):
    """Pauses around the moment of falling asleep: no round may hang or lose a unit."""
    work = Work(code)
    cells = np.zeros(16, np.int64)
    schedule = Schedule.of([Phase((work.step("count", 16, cells),), side_by_side=True)] * 3)
    pool = Pool(compiler, 4)
    rng = np.random.default_rng(1)
    done = threading.Event()

    def hammer():
        for _ in range(300):
            pool.run(schedule)
            time.sleep(float(rng.choice([0, 0, 1e-5, 1e-4, 1e-3, 3e-3])))
        done.set()

    worker = threading.Thread(target=hammer, daemon=True)
    worker.start()
    worker.join(120)
    assert done.is_set()
    pool.close()
    assert (cells == 900).all()


def test_denormals_are_kept_whatever_the_thread_had(compiler):
    """A caller with flush-to-zero gets the contract's floats, and its own word back."""
    if not compiler.target.triple.startswith("x86_64"):
        pytest.skip("the control word is x86's")
    module = compiler.module("control")
    with step(module, "halve", ("x", "word")) as (e, a, begin, end), e.loop(begin, end) as u:
        e.store(e.load(F32, a.x + u * 4) * 0.5, a.x + u * 4)
    for name in ("stmxcsr", "ldmxcsr"):
        with step(module, name, ("word",)) as (e, a, begin, end):
            e.control_word(name, a.word)
    code = compiler.compile(module)
    word, block = np.array([0], np.uint32), np.zeros(1, np.int64)
    block[0] = word.ctypes.data

    def control(name):
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code.address(name))
        function(block.ctypes.data, 0, 1)

    work = Work(code)
    x = np.full(64, 2.0**-140, np.float32)
    schedule = Schedule.of([Phase((work.step("halve", 64, x, 0),), side_by_side=True)])
    control("stmxcsr")
    own = int(word[0])
    pool = Pool(compiler, 2)
    try:
        word[0] = own | 0x8040
        control("ldmxcsr")
        pool.run(schedule)
        control("stmxcsr")
        flushing = int(word[0]) & 0x8040
    finally:
        word[0] = own
        control("ldmxcsr")
        pool.close()
    assert (x == np.float32(2.0**-141)).all()
    assert flushing == 0x8040


def test_an_empty_round_and_closing_twice(compiler):
    pool = Pool(compiler, 3)
    pool.run(Schedule.of([]))
    pool.close()
    pool.close()
    with pytest.raises(EngineError, match="closed"):
        pool.run(Schedule.of([]))


def test_workers_end_with_close(compiler):
    before = set(threading.enumerate())
    pool = Pool(compiler, 4)
    begun = set(threading.enumerate()) - before
    assert len(begun) == 3
    pool.close()
    assert not any(thread.is_alive() for thread in begun)


HAMMER = """
import sys
from pathlib import Path
import numpy as np
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.target import host_target

compiler = Compiler(host_target(), Path(sys.argv[1]), print)
pool, x = Pool(compiler, 5), np.ones(64, np.float32)
args, units = np.array([x.ctypes.data] * 3 + [8], np.int64), np.array([1], np.int64)
library = Library(compiler)
call = StepCall(library.address(Step("add")), args.ctypes.data, units.ctypes.data)
for turn in range(5000):
    schedule = Schedule.of([Phase((call,)), Phase((call,), unless=units.ctypes.data)])
    pool.run(schedule)
    schedule.words[:] = schedule.steps[:] = 0x7FFFFFFFFFFF0001
pool.close()
print("done", len(set(x[:8].tolist())))
"""


def test_nobody_looks_at_a_schedule_once_its_round_is_over(cache):
    """Its memory may be gone by then. A process of its own: a late look would end it."""
    done = subprocess.run(
        [sys.executable, "-c", HAMMER, str(cache)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done 1\n"), done.stderr[-2000:]
