"""Streams, events and graphs: work is done as late as their order allows, and never out of order.

Copies and fills wait in their stream until something needs them: a kernel or a graph with kernels
on the same stream, a stream that waits for an event behind them, or the host that synchronizes.
So a buffer that is used again before its event holds the wrong bytes, every time; and work put on
another stream, or memory given back, meets what is still queued and is refused. A graph in which a
kernel waits for the host runs in a thread of its own, as whoever launches it has to go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from attrs import define, field, frozen

from strata_core.errors import DeviceError
from strata_core.runtime import Launch
from strata_core.testing.sim.failure import BUSY, INVALID_HANDLE, broken


@frozen
class Use:
    """Memory that a piece of work reads or writes: [start, end), host addresses."""

    start: int
    end: int
    writes: bool

    def collides(self, other: Use) -> bool:
        """Whether the order of the two matters."""
        shared = self.start < other.end and other.start < self.end
        return shared and (self.writes or other.writes)


@frozen
class Copy:
    """A copy as it was asked for."""

    target: int
    source: int
    nbytes: int


@frozen
class Fill:
    """A fill as it was asked for."""

    target: int
    value: int
    nbytes: int


Recorded = Copy | Fill | Launch


@define(eq=False)
class Stream:
    """Work in order. `recorded` is what a capture has so far, None outside one.

    `clock` tells per stream the last number of work there that is done before what comes next here.
    `ends` is when all of its work is over, by the accounting clock.
    """

    handle: int
    device: int
    name: str
    queue: deque[Work] = field(factory=deque)
    recorded: list[Recorded] | None = None
    clock: dict[int, int] = field(factory=dict)
    ends: float = 0.0


@define(eq=False)
class Work:
    """A piece of work, a mark of an event (with its stream's clock), or a wait for a mark.

    `takes` is how long it takes, `ends` when it is over, by the accounting clock. `running`: a
    thread of its own does it, and this says whether it still does; `perform` waits for that.
    """

    what: str
    stream: Stream
    uses: tuple[Use, ...] = ()
    perform: Callable[[], None] | None = None
    needs: Work | None = None
    graph: int | None = None
    running: Callable[[], bool] | None = None
    number: int = 0
    done: bool = False
    clock: dict[int, int] = field(factory=dict)
    takes: float = 0.0
    ends: float = 0.0

    def is_over(self) -> bool:
        """At the head of its queue: whether nothing is left to do for it."""
        if self.running is not None:
            return not self.running()
        return self.perform is None and (self.needs is None or self.needs.done)


@define(eq=False)
class Event:
    """An event: the mark of its latest record, and the mark that was last found unfinished."""

    handle: int
    device: int
    timed: bool = False
    mark: Work | None = None
    asked: Work | None = None


@define(eq=False)
class Graph:
    """What a capture recorded, for one device."""

    handle: int
    device: int
    steps: tuple[Recorded, ...]


@define(eq=False)
class Queues:
    """All streams, events and graphs by handle, and the order between what is queued.

    `now` is the host's time by the accounting clock: it moves where the host waits, and work begins
    when it is put, when what stands before it in its stream is over, or what it waits for.
    """

    streams: dict[int, Stream] = field(factory=dict)
    events: dict[int, Event] = field(factory=dict)
    graphs: dict[int, Graph] = field(factory=dict)
    now: float = 0.0
    _handles: Iterator[int] = field(factory=lambda: count(0x51000010, 0x10))
    _numbers: Iterator[int] = field(factory=lambda: count(1))
    _on_device: dict[int, int] = field(factory=dict)

    # handles

    def new_stream(self, device: int, label: str) -> Stream:
        """A stream, named after its device in order of creation."""
        self._on_device[device] = nth = self._on_device.get(device, 0) + 1
        stream = Stream(next(self._handles), device, f"{label}{device}.{nth}")
        self.streams[stream.handle] = stream
        return stream

    def new_event(self, device: int, *, timed: bool = False) -> Event:
        """An event that was not recorded yet."""
        event = Event(next(self._handles), device, timed)
        self.events[event.handle] = event
        return event

    def new_graph(self, device: int, steps: Iterable[Recorded]) -> Graph:
        """A graph of what was recorded."""
        graph = Graph(next(self._handles), device, tuple(steps))
        self.graphs[graph.handle] = graph
        return graph

    def stream(self, handle: int, verb: str) -> Stream:
        """The stream of a handle."""
        if handle not in self.streams:
            raise _no_such(verb, "stream", handle)
        return self.streams[handle]

    def event(self, handle: int, verb: str) -> Event:
        """The event of a handle."""
        if handle not in self.events:
            raise _no_such(verb, "event", handle)
        return self.events[handle]

    def graph(self, handle: int, verb: str) -> Graph:
        """The graph of a handle."""
        if handle not in self.graphs:
            raise _no_such(verb, "graph", handle)
        return self.graphs[handle]

    # work

    def put(self, work: Work) -> None:
        """Queue work; refused where it collides with work that it is not ordered behind."""
        if work.uses:
            self._check_order(work)
        stream = work.stream
        work.number = stream.clock[stream.handle] = next(self._numbers)
        if work.needs is not None:
            for handle, number in work.needs.clock.items():
                stream.clock[handle] = max(number, stream.clock.get(handle, 0))
        elif work.perform is None:
            work.clock = dict(stream.clock)
        before = work.needs.ends if work.needs is not None else 0.0
        work.ends = stream.ends = max(stream.ends, self.now, before) + work.takes
        stream.queue.append(work)
        self.settle(stream)

    def waited(self, until: float) -> None:
        """The host waited for something that is over then."""
        self.now = max(self.now, until)

    def settle(self, stream: Stream) -> None:
        """Take off the head of a queue what has come to its end by itself.

        That are marks and waits with nothing left to wait for, and what another thread has done.
        """
        queue = stream.queue
        while queue and queue[0].is_over():
            queue.popleft().done = True

    def finish(self, work: Work) -> None:
        """Do everything that `work` comes after, and `work`.

        Work that fails is gone with its error; what is queued behind it stays.
        """
        todo = [work]
        while todo:
            if todo[-1].done:
                todo.pop()
                continue
            stream = todo[-1].stream
            head = stream.queue[0]
            if head.needs is not None and not head.needs.done:
                todo.append(head.needs)
                continue
            if head.running is not None and head.perform is not None:
                head.perform()
                self.settle(stream)
                continue
            stream.queue.popleft()
            head.done = True
            if head.perform is not None:
                head.perform()
        self.settle(work.stream)

    def awaits_thread(self, work: Work) -> bool:
        """Whether something that comes before `work` is being done by another thread."""
        for other in work.stream.queue:
            if other.running is not None and other.running():
                return True
            needed = other.needs
            if needed is not None and not needed.done and self.awaits_thread(needed):
                return True
            if other is work:
                break
        return False

    def drain(self, stream: Stream) -> None:
        """Do everything on a stream, and what it waits for."""
        if stream.queue:
            self.finish(stream.queue[-1])

    def idle(self, stream: Stream) -> bool:
        """Whether a stream has nothing left to do."""
        self.settle(stream)
        return not stream.queue

    def queued(self) -> Iterator[Work]:
        """All work that is not done yet."""
        for stream in self.streams.values():
            self.settle(stream)
            yield from stream.queue

    def check_idle(self, use: Use, what: str) -> None:
        """Refuse a use of memory that collides with anything queued."""
        for work in self.queued():
            if any(use.collides(other) for other in work.uses):
                raise _collision(what, use, work)

    def _check_order(self, work: Work) -> None:
        for stream in self.streams.values():
            if stream is work.stream:
                continue
            behind = work.stream.clock.get(stream.handle, 0)
            for other in reversed(stream.queue):
                if other.number <= behind:
                    break  # this and all before it are done first
                for use in work.uses:
                    if any(use.collides(others) for others in other.uses):
                        raise _collision(work.what, use, other)


def _no_such(verb: str, kind: str, handle: int) -> DeviceError:
    return broken(
        f"{verb}: there is no {kind} {handle:#x}",
        INVALID_HANDLE,
        f"a {kind} is used between its creation and its end",
        "keep handles until the last use, and no longer",
    )


def _collision(what: str, use: Use, work: Work) -> DeviceError:
    return broken(
        f"{what}: {use.end - use.start} bytes at {use.start:#x} are in use by a {work.what} "
        f"on stream {work.stream.name}",
        BUSY,
        "memory is used again after the work on it is done, or in its order",
        "wait for an event behind that work, or synchronize its stream",
    )
