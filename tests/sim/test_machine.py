"""A machine of verbs in any order, against a model that knows only what comes before what."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from strata_core.errors import DeviceError, Refused
from strata_core.memory.address import bytes_at
from strata_core.testing.sim import SimHardware, SimRuntime

PAGE = mmap.PAGESIZE
SIZE = 32  # bytes of a buffer that copies use
VRAM = 4 * 256
PINS = 4 * PAGE
PAGES = 2


@define(eq=False)
class Buffer:
    """Memory of the simulator, and what it should hold."""

    kind: str
    address: int
    data: np.ndarray
    page: int = 0
    live: bool = True


@define(eq=False)
class Task:
    """A copy, a fill, a mark or a wait; `before` are the tasks that come directly before it."""

    before: list[Task]
    reads: tuple[Buffer, int, int] | None = None
    writes: tuple[Buffer, int, int] | None = None
    value: int = 0
    done: bool = False

    def all_before(self) -> list[Task]:
        """Everything unfinished that has to be done first, oldest last."""
        seen: dict[int, Task] = {}
        todo = [t for t in self.before if not t.done]
        while todo:
            task = todo.pop()
            if id(task) not in seen:
                seen[id(task)] = task
                todo += [t for t in task.before if not t.done]
        return list(seen.values())

    def collides(self, reads, writes) -> bool:
        def meet(a, b) -> bool:
            return (
                a is not None
                and b is not None
                and a[0] is b[0]
                and a[1] < b[1] + b[2]
                and b[1] < a[1] + a[2]
            )

        return meet(self.writes, writes) or meet(self.writes, reads) or meet(self.reads, writes)


@define(eq=False)
class Lane:
    """A stream: its handle and its last task."""

    handle: int
    last: Task | None = None


@define(eq=False)
class Mark:
    """An event: its handle, its latest mark, and the mark last asked for in vain."""

    handle: int
    task: Task | None = None
    asked: Task | None = None


@define(eq=False)
class Model:
    """All tasks not done, in the order they were given."""

    tasks: list[Task] = field(factory=list)

    def finish(self, last: Task) -> None:
        """Do a task and all before it, in the order given, which keeps every dependency."""
        needed = {id(t) for t in last.all_before()} | {id(last)}
        for task in self.tasks:
            if id(task) in needed:
                task.done = True
                if task.writes is not None:
                    target, at, count = task.writes
                    if task.reads is not None:
                        source, start, _ = task.reads
                        target.data[at : at + count] = source.data[start : start + count]
                    else:
                        target.data[at : at + count] = task.value
        self.tasks = [t for t in self.tasks if not t.done]

    def busy(self, buffer: Buffer) -> bool:
        """Whether a task that is not done touches a buffer."""
        whole = (buffer, 0, 1 << 40)
        return any(t.collides(None, whole) for t in self.tasks)


spans = st.sampled_from([(0, 0, 32), (0, 16, 16), (16, 0, 16), (8, 8, 8)])


class Verbs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim = SimRuntime(
            SimHardware(vram=(VRAM,), pin_budget=PINS, context_pins=PAGE), host_kernels={}
        )
        self.sim.open_context(0)
        self.mapping = mmap.mmap(-1, PAGES * PAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.model = Model()
        self.buffers: list[Buffer] = []
        self.broken = 0

    memory = Bundle("memory")
    lanes = Bundle("lanes")
    marks = Bundle("marks")

    @initialize(target=lanes)
    def streams(self):
        return multiple(*(Lane(self.sim.create_stream(0)) for _ in range(3)))

    @initialize(target=marks)
    def events(self):
        return multiple(*(Mark(self.sim.create_event(0)) for _ in range(2)))

    @initialize(target=memory)
    def first_memory(self):
        return multiple(
            self.made("device", self.sim.alloc(0, SIZE)),
            self.made("pinned", self.sim.host_alloc(SIZE)),
        )

    # memory

    def made(self, kind: str, address: int, page: int = 0) -> Buffer:
        data = bytes_at(address, SIZE).copy()
        buffer = Buffer(kind, address, data, page)
        self.buffers.append(buffer)
        return buffer

    def held(self, kinds: str) -> int:
        return sum(b.live and b.kind in kinds for b in self.buffers)

    def refused(self, act) -> None:
        with pytest.raises(Refused):
            act()
        assert self.sim.take_error() == "out of memory (error 2)"

    def breaks(self, act) -> None:
        with pytest.raises(DeviceError) as caught:
            act()
        assert not isinstance(caught.value, Refused)
        assert self.sim.take_error()
        self.broken += 1

    @rule(target=memory)
    def alloc(self):
        if self.held("device") == VRAM // 256:
            self.refused(lambda: self.sim.alloc(0, SIZE))
            return self.buffers[-1]
        return self.made("device", self.sim.alloc(0, SIZE))

    @rule(target=memory)
    def host_alloc(self):
        if self.held("pinned registered") == PINS // PAGE - 1:
            self.refused(lambda: self.sim.host_alloc(SIZE))
            return self.buffers[-1]
        return self.made("pinned", self.sim.host_alloc(SIZE))

    @rule(target=memory, page=st.integers(0, PAGES - 1))
    def register(self, page):
        address = self.base + page * PAGE
        mine = [b for b in self.buffers if b.live and b.kind == "registered" and b.page == page]
        if mine:
            self.breaks(lambda: self.sim.register(address, PAGE))
            return mine[0]
        if self.held("pinned registered") == PINS // PAGE - 1:
            self.refused(lambda: self.sim.register(address, PAGE))
            return self.buffers[-1]
        self.sim.register(address, PAGE)
        return self.made("registered", address, page)

    @rule(buffer=memory)
    def give_back(self, buffer):
        act = {
            "device": lambda: self.sim.free(0, buffer.address),
            "pinned": lambda: self.sim.host_free(buffer.address),
            "registered": lambda: self.sim.unregister(buffer.address),
        }[buffer.kind]
        if not buffer.live:
            if buffer.kind == "device":  # a host address may have come back to somebody else
                self.breaks(act)
            return
        if self.model.busy(buffer):
            self.breaks(act)
            return
        assert (bytes_at(buffer.address, SIZE) == buffer.data).all()
        act()
        buffer.live = False

    @rule(buffer=memory, value=st.integers(0, 255))
    def write(self, buffer, value):
        """The host writes memory where nothing queued uses it."""
        if not buffer.live:
            return
        if self.model.busy(buffer):
            with pytest.raises(DeviceError):
                self.sim.check_idle(buffer.address, SIZE)
            self.broken += 1
            return
        self.sim.check_idle(buffer.address, SIZE)
        bytes_at(buffer.address, SIZE)[:] = value
        buffer.data[:] = value

    # order

    def put(self, lane: Lane, act, wants=None, **what) -> None:
        task = Task([lane.last] if lane.last else [], **what)
        if wants is not None:
            task.before.append(wants)
        first = task.all_before()
        if any(t.collides(task.reads, task.writes) and t not in first for t in self.model.tasks):
            self.breaks(act)
            return
        act()
        self.model.tasks.append(task)
        lane.last = task
        # A mark or a wait with nothing before it is done at once.
        if task.writes is None and not task.all_before():
            self.model.finish(task)

    @rule(lane=lanes, into=memory, source=memory, span=spans)
    def copy(self, lane, into, source, span):
        if not (into.live and source.live):
            return
        at, start, count = span
        to, frm = into.address + at, source.address + start
        if into is source and at < start + count and start < at + count:
            self.breaks(lambda: self.sim.copy(to, frm, count, lane.handle))
            return
        self.put(
            lane,
            lambda: self.sim.copy(to, frm, count, lane.handle),
            reads=(source, start, count),
            writes=(into, at, count),
        )

    @rule(lane=lanes, into=memory, span=spans, value=st.integers(0, 255))
    def fill(self, lane, into, span, value):
        if not into.live:
            return
        at, _, count = span

        def act() -> None:
            self.sim.fill(into.address + at, value, count, lane.handle)

        if into.kind != "device":
            self.breaks(act)
            return
        self.put(lane, act, writes=(into, at, count), value=value)

    @rule(lane=lanes, mark=marks)
    def record(self, lane, mark):
        self.put(lane, lambda: self.sim.record(mark.handle, lane.handle))
        mark.task = lane.last

    @rule(lane=lanes, mark=marks)
    def wait(self, lane, mark):
        if mark.task is None:
            self.sim.wait(lane.handle, mark.handle)
            return
        self.put(lane, lambda: self.sim.wait(lane.handle, mark.handle), wants=mark.task)

    @rule(a=lanes, b=lanes, mark=marks, first=memory, second=memory, third=memory)
    def hand_over(self, a, b, mark, first, second, third):
        """What every policy does: one stream goes on with what another has brought."""
        self.copy(a, second, first, (0, 0, SIZE))
        self.record(a, mark)
        self.wait(b, mark)
        self.copy(b, third, second, (0, 0, SIZE))

    @rule(mark=marks)
    def finished(self, mark):
        task = mark.task
        answer = self.sim.finished(mark.handle)
        if task is None or task.done or not any(t.writes for t in task.all_before()):
            assert answer
            if task is not None and not task.done:
                self.model.finish(task)
        elif mark.asked is task:
            assert answer
            self.model.finish(task)
        else:
            assert not answer
            mark.asked = task

    @rule(lane=lanes)
    def synchronize(self, lane):
        self.sim.synchronize(lane.handle)
        if lane.last is not None and not lane.last.done:
            self.model.finish(lane.last)

    # always

    @invariant()
    def memory_holds_what_the_model_says(self):
        for buffer in self.buffers:
            if buffer.live:
                assert (bytes_at(buffer.address, SIZE) == buffer.data).all()

    @invariant()
    def budgets_add_up(self):
        assert self.sim.memory(0).free == VRAM - 256 * self.held("device")
        pinned = self.sim.report()["pinned"]["in_use"]
        assert pinned == PAGE * (1 + self.held("pinned registered"))
        assert len(self.sim.breaches) == self.broken

    def teardown(self):
        for stream in list(self.sim.queues.streams):
            self.sim.synchronize(stream)
        for buffer in self.buffers:
            if buffer.live and buffer.kind == "registered":
                self.sim.unregister(buffer.address)
        self.sim.close()
        self.mapping.close()


TestVerbs = Verbs.TestCase
TestVerbs.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
