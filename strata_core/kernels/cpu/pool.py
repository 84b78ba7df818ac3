"""Our own threads: each enters one compiled loop, without the GIL, and stays there while busy.

The leader is the thread that calls `run`; it works like the others. A worker that has had nothing
to do for some milliseconds leaves the loop and sleeps in a lock until the leader wakes it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from strata_core.errors import EngineError
from strata_core.kernels.cpu.clock import host_clock
from strata_core.kernels.cpu.crew import (
    LEADER,
    LEAVES_OUT,
    LINE,
    PARKED,
    PATIENCE,
    PHASE_WORDS,
    SIDE_BY_SIDE,
    STEP_WORDS,
    STOPPED,
    TOGETHER,
    UNLESS,
    WORDS,
    emit_crew,
)
from strata_core.kernels.cpu.jit import Code, Compiler

Words = NDArray[np.int64]


@frozen
class StepCall:
    """A compiled step with its argument block and the address of its number of units."""

    function: int
    args: int
    units: int


@frozen
class Phase:
    """Steps that run before the next phase begins: together on each unit, or side by side.

    In a `leader` phase the thread that called `run` does them all, in order. Where the int64 word
    at address `unless` is 0 after it, the next `leaves_out` phases are left out; the word is
    written by this phase or before it, once a round.
    """

    steps: tuple[StepCall, ...]
    side_by_side: bool = False
    leader: bool = False
    unless: int = 0
    leaves_out: int = 0

    @property
    def kind(self) -> int:
        """The crew's number for it."""
        return LEADER if self.leader else SIDE_BY_SIDE if self.side_by_side else TOGETHER


@frozen(eq=False)
class Schedule:
    """Phases laid out for the crew. What their addresses point to must outlive it."""

    words: Words
    steps: Words
    count: int
    address: int = field(init=False)

    @address.default
    def _of_words(self) -> int:
        return int(self.words.ctypes.data)

    @classmethod
    def of(cls, phases: Sequence[Phase]) -> Schedule:
        """Lay out phases."""
        steps = np.zeros((sum(len(p.steps) for p in phases), STEP_WORDS), np.int64)
        words = aligned_words(len(phases) * PHASE_WORDS).reshape(-1, PHASE_WORDS)
        row = 0
        for phase, line in zip(phases, words, strict=True):
            line[:3] = steps.ctypes.data + row * steps.strides[0], len(phase.steps), phase.kind
            line[UNLESS], line[LEAVES_OUT] = phase.unless, phase.leaves_out
            for step in phase.steps:
                steps[row, :3] = step.function, step.args, step.units
                row += 1
        return cls(words, steps, len(phases))


def _place(name: str) -> int:
    """Where a word of the crew's is."""
    return WORDS.index(name) * LINE // 8


_PHASES, _COUNT = _place("phases"), _place("count")


def aligned_words(count: int) -> Words:
    """Zeroed int64 words that start on a cache line."""
    raw = np.zeros(count + LINE // 8, np.int64)
    start = -raw.ctypes.data % LINE // 8
    return raw[start : start + count]


class Pool:
    """`threads` threads, the caller of `run` among them. One thread at a time may call `run`.

    `close` ends the workers; a pool that is dropped without it leaves them asleep.
    """

    def __init__(self, compiler: Compiler, threads: int) -> None:
        if threads < 1:
            raise ValueError("a pool needs at least one thread")
        self._code = compiler.obtain("crew", lambda module: emit_crew(module, compiler.target))
        self.threads = threads
        self._crew = aligned_words((PARKED + threads) * LINE // 8)
        self._at, self._words = int(self._crew.ctypes.data), self._crew.data
        self._yield = yield_function()
        self._set("threads", threads)
        self._set("yield", self._yield)
        clock = host_clock()
        self._set("clock", clock.function)
        self._set("clock_id", clock.number)
        self._set("patience", int(PATIENCE * clock.ticks))
        kind = ctypes.CFUNCTYPE
        self._begin = kind(ctypes.c_int64, ctypes.c_int64)(self._code.address("begin"))
        self._lead = kind(None, ctypes.c_int64)(self._code.address("lead"))
        self._locks = [threading.Lock() for _ in range(threads)]
        self._closed = False
        self._workers = [self._start(index) for index in range(1, threads)]

    def run(self, schedule: Schedule) -> None:
        """Run all phases; returns when every thread has finished the last one."""
        if self._closed:
            raise EngineError(
                "a closed thread pool was asked to compute",
                "its backend was closed before its executor",
                "this is an error in the engine; please report it",
            )
        self._words[_PHASES], self._words[_COUNT] = schedule.address, schedule.count
        self._wake(self._begin(self._at))
        self._lead(self._at)

    def close(self) -> None:
        """End the workers and wait for them. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._set("count", 0)
        self._set("stop", 1)
        self._wake(self._begin(self._at))
        for worker in self._workers:
            worker.join()

    def asleep(self) -> int:
        """Workers that sleep now, or are about to."""
        return int(self._crew[(PARKED + 1) * LINE // 8 :: LINE // 8].sum())

    def _set(self, name: str, value: int) -> None:
        self._crew[_place(name)] = value

    def _wake(self, asleep: int) -> None:
        if asleep:
            for index in range(1, self.threads):
                if self._crew[(PARKED + index) * LINE // 8 + 1]:
                    self._locks[index].release()

    def _start(self, index: int) -> threading.Thread:
        lock = self._locks[index]
        lock.acquire()
        worker = threading.Thread(
            target=_serve,
            args=(self._code, self._crew, index, lock),
            name=f"strata-cpu-{index}",
            daemon=True,
        )
        worker.start()
        return worker


def _serve(code: Code, crew: Words, index: int, lock: threading.Lock) -> None:
    """A worker's whole life: the compiled loop, and sleep."""
    serve = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(code.address("serve"))
    seen = 0
    while (seen := serve(crew.ctypes.data, index, seen)) != STOPPED:
        lock.acquire()


def yield_function() -> int:
    """Address of the system's call that gives the processor to another thread; 0 without one."""
    try:
        if sys.platform == "win32":
            function = ctypes.WinDLL("kernel32").SwitchToThread
        else:
            function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
