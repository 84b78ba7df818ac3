"""Launching and waiting from the crew: who does it, in which order, and what a failure leaves."""

import ctypes
import sys
import threading
import time

import numpy as np
import pytest

from strata_core.kernels.cpu.clock import Clock, host_clock
from strata_core.kernels.cpu.hand_over import LAUNCH_FAILED, NO_FAILURE, TIMED_OUT
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall, yield_function
from strata_core.kernels.cpu.target import host_target

LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture(scope="module")
def library(cache):
    return Library(Compiler(host_target(), cache, print))


class Line:
    """Launch and wait steps with their cells."""

    def __init__(self, library, launch=lambda graph: 0):
        self.library, self.keep = library, []
        self.word, self.wanted, self.failure = (np.zeros(n, np.int64) for n in (1, 1, 2))
        self.seen = []

        def called(graph, stream):
            self.seen.append((graph, stream, threading.get_ident()))
            return launch(graph)

        self.launcher = LAUNCHER(called)

    def words(self, *values):
        block = np.array(values, np.int64)
        self.keep.append(block)
        return block.ctypes.data

    def step(self, name, *args):
        return StepCall(self.library.address(Step(name)), self.words(*args), self.words(1))

    def launch(self, graph, label=0):
        function = ctypes.cast(self.launcher, ctypes.c_void_p).value
        return self.step("launch", function, graph, 99, self.failure.ctypes.data, label)

    def wait(self, label=0, seconds=60.0, give_way=True, clock=None):
        self.keep.append(clock)  # its function is gone with it
        clock = clock.as_clock() if clock else host_clock()
        bound = int(seconds * clock.ticks)
        where = (self.word.ctypes.data, self.wanted.ctypes.data)
        how = (bound, clock.function, clock.number, yield_function() if give_way else 0)
        return self.step("wait", *where, *how, self.failure.ctypes.data, label)


CLOCK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64))
not_windows = pytest.mark.skipif(sys.platform == "win32", reason="a clock is called otherwise")


class TestClock:
    """A clock of which each look takes a hundredth of a second; it calls `look(number)` first."""

    __test__ = False

    def __init__(self, look=lambda number: None):
        self.looks, self.look = 0, look
        self._called = CLOCK(self._read)

    def _read(self, number, cell):
        self.looks += 1
        self.look(self.looks)
        cell[0], cell[1] = divmod(self.looks * 10_000_000, 1_000_000_000)
        return 0

    def as_clock(self):
        return Clock(ctypes.cast(self._called, ctypes.c_void_p).value, 0, 1_000_000_000)


@pytest.fixture(params=[1, 3])
def pool(library, request):
    made = Pool(library._compiler, request.param)
    yield made
    made.close()


def test_the_leader_alone_launches_in_order(library, pool):
    line = Line(library)
    phases = [Phase((line.launch(7), line.launch(8)), leader=True) for _ in range(20)]
    pool.run(Schedule.of(phases))
    assert line.seen == [(g, 99, threading.get_ident()) for _ in range(20) for g in (7, 8)]
    assert line.failure.tolist() == [NO_FAILURE, 0]


@not_windows
def test_a_wait_ends_when_the_word_has_the_number(library, pool):
    line = Line(library)
    line.wanted[0] = 5

    def answer(number):
        assert line.seen == [], "nothing is launched before"
        line.word[0] = number

    clock = TestClock(answer)
    waits = line.wait(clock=clock)
    pool.run(Schedule.of([Phase((waits, line.launch(1)), leader=True)]))
    assert clock.looks == 5
    assert len(line.seen) == 1
    assert line.failure.tolist() == [NO_FAILURE, 0]


@not_windows
@pytest.mark.parametrize("give_way", [True, False])
def test_a_wait_is_bounded_and_what_follows_falls_through(library, pool, give_way):
    line, clock = Line(library), TestClock()
    line.wanted[0] = 5
    waits = line.wait(3, 0.05, give_way, clock)
    late = Phase((waits, line.launch(1), line.wait(4)), leader=True)
    pool.run(Schedule.of([late, late]))
    assert clock.looks == 7, "the first look begins, the seventh is after more than five hundredths"
    assert line.failure.tolist() == [TIMED_OUT, 3]
    assert line.seen == []


@pytest.mark.parametrize("give_way", [True, False])
def test_the_systems_clock_bounds_a_wait(library, pool, give_way):
    line = Line(library)
    line.wanted[0] = 5
    start = time.monotonic()
    pool.run(Schedule.of([Phase((line.wait(3, 0.05, give_way),), leader=True)]))
    assert 0.05 <= time.monotonic() - start < 60
    assert line.failure.tolist() == [TIMED_OUT, 3]


@not_windows
def test_an_answer_that_came_while_the_host_was_held_up_is_in_time(library, pool):
    """As where the process was stopped between a look at the word and one at the clock."""
    line = Line(library)
    line.wanted[0] = 5

    def held_up(number):
        if number > 6:
            line.word[0] = 5

    waits = line.wait(3, 0.05, clock=TestClock(held_up))
    pool.run(Schedule.of([Phase((waits, line.launch(1)), leader=True)]))
    assert line.failure.tolist() == [NO_FAILURE, 0]
    assert len(line.seen) == 1


def test_a_launch_that_fails_is_latched(library, pool):
    line = Line(library, lambda graph: 2 if graph == 8 else 0)
    line.wanted[0] = 5
    steps = (line.launch(7, 1), line.launch(8, 2), line.launch(9, 3), line.wait(4, 30))
    pool.run(Schedule.of([Phase(steps, leader=True)]))
    assert line.failure.tolist() == [LAUNCH_FAILED, 2]
    assert [graph for graph, *_ in line.seen] == [7, 8]


@pytest.mark.parametrize("word", [0, 3])
def test_phases_are_left_out_where_a_word_is_nothing(library, pool, word):
    line = Line(library)
    counted = np.zeros(2, np.int64)
    picks = np.array([-1, 5, -1, 0, 2] if word else [-1] * 5, np.int32)
    entries = np.array([5], np.int64)
    addresses = [array.ctypes.data for array in (picks, entries, counted, line.failure)]
    tally = line.step("tally", *addresses)
    more = Phase((line.launch(2),), leader=True)
    phases = []
    for turn in range(200):
        gate = (line.launch(1), tally) if turn == 0 else (line.launch(1),)
        skips = Phase(gate, leader=True, unless=counted.ctypes.data, leaves_out=2)
        phases += [skips, more, more, Phase((line.launch(3),), leader=True)]
    for _ in range(3):
        line.seen.clear()
        pool.run(Schedule.of(phases))
        assert [graph for graph, *_ in line.seen] == ([1, 2, 2, 3] if word else [1, 3]) * 200
        assert counted.tolist() == [word, word > 0]


def test_a_stamp_is_the_time_and_an_answer_the_number(library, pool):
    line = Line(library)
    clock, out, words = host_clock(), np.zeros(2, np.int64), np.zeros(2, np.int64)
    line.wanted[0] = (1 << 40) + 7
    told = [words[n:].ctypes.data for n in range(2)]
    wanted, failure = line.wanted.ctypes.data, line.failure.ctypes.data
    stamps = [line.step("stamp", out[n:].ctypes.data, clock.function, clock.number) for n in (0, 1)]
    late = line.wait(3, 0.05, give_way=True)
    steps = (
        stamps[0],
        line.step("answer", told[0], wanted, failure),
        late,
        line.step("answer", told[1], wanted, failure),
        stamps[1],
    )
    pool.run(Schedule.of([Phase(steps, leader=True)]))
    assert words.tolist() == [line.wanted[0], 0], "after a failure nobody is answered"
    assert (out[1] - out[0]) / clock.ticks > 0.04


def test_one_step_runs_alone(library):
    line = Line(library)
    call = line.launch(7)
    library.runner()(call.function, call.args, 0, 1)
    assert [graph for graph, *_ in line.seen] == [7]


def test_a_plan_leaves_other_lanes_out(library):
    picks = np.array([2, -1, 0, 2, -1, -1], np.int32)
    table = np.arange(9, dtype=np.int64).reshape(3, 3) + 100
    tokens = np.array([3], np.int64)
    groups, units = np.zeros((4, 4), np.int64), np.zeros(2, np.int64)
    xs, ys = np.arange(3, dtype=np.int64) + 10, np.arange(6, dtype=np.int64) + 20
    inner = ys + 10
    out = np.zeros((3, 6), np.int64)
    counters = np.array([5, 1, 10, 20, 30], np.int64)
    arrays = (groups, units)
    args = [picks, tokens, 2, 3, table, *arrays, 4, 3, xs, ys, inner, *out, counters]
    block = np.array([a.ctypes.data if isinstance(a, np.ndarray) else a for a in args], np.int64)
    library.runner()(library.address(Step("plan")), block.ctypes.data, 0, 1)
    assert groups.tolist() == [[100, 101, 102, 0], [106, 107, 108, 1], [0, 0, 0, 3], [0] * 4]
    assert units.tolist() == [8, 6]
    assert out[:, :3].tolist() == [[11, 10, 11], [22, 20, 23], [32, 30, 33]]
    assert counters.tolist() == [8, 3, 11, 20, 32]
