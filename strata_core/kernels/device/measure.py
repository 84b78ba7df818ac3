"""Measuring the lanes at start, in about a tenth of a second: what the link moves and what the CPU
computes while both are at it, as in a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from statistics import median

from attrs import define, frozen

from strata_core.errors import DeviceError, Refused
from strata_core.interfaces import BlobLayout
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.host_lane import HostLane
from strata_core.kernels.device.split import Lane
from strata_core.memory.held import Held
from strata_core.runtime import Runtime, StatesLink

LAYERS = 12
"""Layers that one trial computes, one behind the other and without the interpreter."""

LIMIT = 0.08
"""Seconds after which no further pair of trials is begun."""

PAIRS = 8
"""The most pairs of trials: of few and of many experts a layer."""

MARKS = 64
"""Events among the copies of a trial, by which is seen how far they have come."""

AHEAD = 2.0
"""So much more is put on the link than it is likely to move in a trial: it must stay busy."""

MOST_COPIES = 1024

KERNEL_SHARE = 0.9
"""What kernels read through an alias of what a copy engine moves (docs/experiments.md, 3)."""

KERNEL_START = 8e-6
"""Seconds until a kernel has the first bytes through an alias (docs/experiments.md, 3)."""


@frozen
class Sample:
    """Experts of one layer that both lanes can compute."""

    layer: int
    layout: BlobLayout
    experts: tuple[int, ...]


@frozen
class Lanes:
    """What both lanes were measured to do."""

    link: Lane
    cpu: Lane


def samples(cells: Cells, host: HostLane) -> list[Sample]:
    """Experts with an alias and an address, and in no slot: of LAYERS layers, the fullest ones."""
    found = []
    for layer, table in cells.layers.items():
        known = host.experts[layer]
        both = (table["alias"][:, 0] != 0) & (known.table[:, 0] != 0) & (table["slot"][:, 0] == 0)
        experts = tuple(both.nonzero()[0].tolist())
        if experts:
            found.append(Sample(layer, known.layout, experts))
    return sorted(found, key=lambda each: -len(each.experts))[:LAYERS]


class CpuTrials:
    """The CPU's lane over layers of a sample, by its own phases; each trial reads other experts.

    Rows that were just read would come out of a cache, which those of a round do not.
    """

    def __init__(self, host: HostLane, pool: Pool, over: Sequence[Sample], top_k: int) -> None:
        self._host, self._pool = host, pool
        self.most = min(top_k, len(over[0].experts))
        self.over = [sample for sample in over if len(sample.experts) >= self.most]
        self.few = max(1, self.most // 4)
        self.nbytes = sum(sample.layout.nbytes for sample in self.over) / len(self.over)
        self._next = 0
        self._nothing = Schedule.of([Phase((), leader=True)])

    def ready(self, count: int) -> Callable[[], float]:
        """A trial of `count` experts of each layer; calling it gives the seconds a layer."""
        picks = {}
        for sample in self.over:
            turned = islice(cycle(sample.experts), self._next, None)
            picks[sample.layer] = list(islice(turned, count))
        self._next = (self._next + count) % len(self.over[0].experts)
        trial = self._host.trial(picks)
        return lambda: self._host.try_out(self._pool, trial) / len(self.over)

    def wake(self) -> None:
        """Have the pool's threads awake, as they are in a round."""
        self._pool.run(self._nothing)

    def places(self, layer: int, index: int) -> list[int]:
        """Addresses of an expert's parts."""
        found: list[int] = self._host.experts[layer].table[index].tolist()
        return found

    def lane(self, few: Sequence[float], many: Sequence[float]) -> Lane:
        """The line through the times of few experts and of many."""
        short, long = median(few), median(many)
        rate = self.most * self.nbytes / max(long, 1e-9)
        if self.most > self.few and long > short:
            rate = (self.most - self.few) * self.nbytes / (long - short)
        return Lane(max(0.0, short - self.few * self.nbytes / rate), rate)


@define(eq=False)
class LinkTrials:
    """Copies of experts to one place of a device, under way while something else is measured."""

    runtime: Runtime
    stream: int
    target: int
    pieces: Iterator[list[tuple[int, int]]]
    nbytes: float
    marks: list[int]
    copies: int = MARKS
    _moved: float = 0.0
    _watched: float = 0.0
    _whole: float = 0.0
    _begun: float = 0.0
    _seen: tuple[float, int] = (0.0, 0)

    @property
    def _each(self) -> int:
        """Copies before every mark."""
        return -(-self.copies // len(self.marks))

    def begin(self) -> None:
        """Put copies on the stream."""
        self._begun = time.perf_counter()
        for mark in self.marks:
            for _ in range(self._each):
                for place, nbytes in next(self.pieces):
                    self.runtime.copy(self.target, place, nbytes, self.stream)
            self.runtime.record(mark, self.stream)

    def look(self) -> None:
        """See how far they have come; now the other thing begins."""
        self._seen = time.perf_counter(), self._done(0)

    def end(self) -> None:
        """See how far they have come since, and wait for the rest."""
        before, first = self._seen
        now, last = time.perf_counter(), self._done(self._seen[1])
        self.runtime.synchronize(self.stream)
        each = self._each * self.nbytes
        self._whole = len(self.marks) * each / max(time.perf_counter() - self._begun, 1e-9)
        if last < len(self.marks):
            self._moved += (last - first) * each
            self._watched += now - before
        else:  # it was idle for a while
            self.copies = min(MOST_COPIES, 2 * self.copies)

    @property
    def rate(self) -> float:
        """Bytes a second while it was watched, in all, so that what lies between marks evens out.

        Where nothing was seen to arrive then, those of all copies of the last time.
        """
        return self._moved / self._watched if self._moved else self._whole

    def busy_for(self, seconds: float) -> None:
        """Have so many copies that the link is busy for longer than that."""
        expected = AHEAD * seconds * self._whole / self.nbytes
        self.copies = min(MOST_COPIES, max(MARKS, int(expected)))
        self._moved = self._watched = 0.0

    def _done(self, start: int) -> int:
        done = start
        while done < len(self.marks) and self.runtime.finished(self.marks[done]):
            done += 1
        return done


def lanes_together(
    runtime: Runtime,
    held: Held,
    device: int,
    stream: int,
    cpu: CpuTrials,
) -> Lanes | None:
    """Both lanes while both are at it; None where the link cannot be measured.

    A runtime that states its link is believed, and the CPU is measured by itself.
    """
    if isinstance(runtime, StatesLink):
        return Lanes(Lane(KERNEL_START, runtime.link_rate(device)), _trials(cpu, None))
    largest = max(sample.layout.nbytes for sample in cpu.over)
    marks: list[int] = []
    try:
        target = held.device(device, largest, "measuring the link")
    except Refused:
        return None
    try:
        marks += [runtime.create_event(device) for _ in range(MARKS)]
        link = LinkTrials(runtime, stream, target, _pieces(cpu), cpu.nbytes, marks)
        found = _trials(cpu, link)
        return Lanes(Lane(KERNEL_START, link.rate * KERNEL_SHARE), found)
    except DeviceError:
        runtime.take_error()
        return None
    finally:
        with suppress(DeviceError):
            runtime.synchronize(stream)
        for mark in marks:
            with suppress(DeviceError):
                runtime.destroy_event(mark)
        with suppress(DeviceError):
            held.release(target)


def _trials(cpu: CpuTrials, link: LinkTrials | None) -> Lane:
    """Trials of few and of many experts in turn, with the link busy where there is one to watch."""
    alone = min(_trial(cpu, cpu.most, None), _trial(cpu, cpu.most, None))
    if link is not None:
        link.begin()
        link.look()
        link.end()
        link.busy_for(alone * len(cpu.over))
    began = time.perf_counter()
    times: dict[int, list[float]] = {cpu.few: [], cpu.most: []}
    for pair in range(PAIRS):
        if pair and time.perf_counter() - began > LIMIT:
            break
        for count, taken in times.items():
            taken.append(_trial(cpu, count, link))
    return cpu.lane(times[cpu.few], times[cpu.most])


def _trial(cpu: CpuTrials, count: int, link: LinkTrials | None) -> float:
    trial = cpu.ready(count)
    if link is not None:
        link.begin()
    cpu.wake()
    if link is not None:
        link.look()
    seconds = trial()
    if link is not None:
        link.end()
    return seconds


def _pieces(cpu: CpuTrials) -> Iterator[list[tuple[int, int]]]:
    """Addresses and bytes of the experts of a sample in turn, from the last one on, without end.

    The CPU goes the other way round, so that the lanes seldom read the same one.
    """
    found = []
    for turn in range(max(len(sample.experts) for sample in cpu.over)):
        for sample in cpu.over:
            if turn < len(sample.experts):
                index = sample.experts[-1 - turn]
                found.append(_joined(sample.layout, cpu.places(sample.layer, index)))
    return cycle(found)


def _joined(layout: BlobLayout, places: Sequence[int]) -> list[tuple[int, int]]:
    """The copies that an expert takes: one where its parts follow each other."""
    joined: list[tuple[int, int]] = []
    for part, place in zip(layout.parts, places, strict=True):
        if joined and sum(joined[-1]) == place:
            joined[-1] = joined[-1][0], joined[-1][1] + part.nbytes
        else:
            joined.append((place, part.nbytes))
    return joined
