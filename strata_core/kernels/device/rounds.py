"""Rounds: graphs of one mode, and the schedule by which compiled code launches and awaits them.

A round with other lanes is *stepped*: launch a segment, wait for its mail, let helpers and the CPU
compute, launch the next one. Or it is a *doorbell*: all segments are one graph, and what would be
the next launch is an answer that the device waits for. All of it is one schedule of the CPU's pool,
so nothing of it waits for the interpreter but experts that have no address and must be asked for. A
round without other lanes, `device`, is one graph, launched and awaited by the calling thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.errors import StrataError
from strata_core.interfaces import Expert
from strata_core.kernels.cpu.clock import Clock, host_clock
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.pool import Phase, Schedule, StepCall, yield_function
from strata_core.kernels.cpu.storage import Storage
from strata_core.kernels.device.capture import capture, kernels_of
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.exchange import LINE, word
from strata_core.kernels.device.fuse import fuse
from strata_core.kernels.device.helper import Helper
from strata_core.kernels.device.host_lane import HostLane
from strata_core.kernels.device.lower import Lowering
from strata_core.kernels.device.segments import Mode, Places, Segment
from strata_core.kernels.device.split import Split
from strata_core.kernels.device.workspace import Model
from strata_core.memory.held import undo_all
from strata_core.runtime import Runtime

Dispatch = Literal["device", "stepped", "doorbell"]


@frozen(eq=False)
class Round:
    """A mode, ready to run: the CPU's pool runs `schedule`, or the calling thread `steps`."""

    mode: Mode
    schedule: Schedule | None
    steps: tuple[StepCall, ...]
    graphs: tuple[int, ...]
    dispatch: Dispatch


@define(eq=False)
class Hand:
    """Makes the steps that launch and wait; `bound` is the most seconds that a wait takes.

    `failure` is the cell that the first failure of a round is latched in.
    """

    library: Library
    launcher: int
    wanted: int
    bound: float
    failure: NDArray[np.int64]
    _storage: Storage = field(factory=Storage, init=False)
    _clock: Clock = field(factory=host_clock, init=False)

    def launch(self, graph: int, stream: int, label: int) -> StepCall:
        """Launch a graph."""
        return self._step("launch", self.launcher, graph, stream, self.cell, label)

    def wait(self, address: int, label: int) -> StepCall:
        """Wait until the word at an address holds the number of the round."""
        clock = self._clock
        bound = int(self.bound * clock.ticks)
        how = (bound, clock.function, clock.number, yield_function())
        return self._step("wait", address, self.wanted, *how, self.cell, label)

    def stamp(self, address: int) -> StepCall:
        """Write down there what the host's clock says."""
        return self._step("stamp", address, self._clock.function, self._clock.number)

    @property
    def ticks(self) -> float:
        """Ticks of that clock in a second."""
        return float(self._clock.ticks)

    def answer(self, address: int) -> StepCall:
        """Write the number of the round where the device waits for it."""
        return self._step("answer", address, self.wanted, self.cell)

    @property
    def cell(self) -> int:
        """Address of `failure`."""
        return int(self.failure.ctypes.data)

    def _step(self, name: str, *args: int) -> StepCall:
        address = self.library.address(Step(name))
        return StepCall(address, self._storage.words(args), self._storage.words([1]))


@define(eq=False)
class Maker:
    """Makes rounds for one bound model, whose misses go where `split` says.

    `ticks` are those in a second of the clock by which the device's kernels bound their waits.
    """

    runtime: Runtime
    device: int
    stream: int
    model: Model
    places: Places
    cells: Cells
    helpers: Sequence[Helper]
    host: HostLane
    hand: Hand
    split: Split
    ticks: float = 0.0

    def make(self, mode: Mode, doorbell: float | None = None) -> Round:
        """Lower, load, capture and lay out the schedule of a mode.

        `doorbell`: seconds that the device waits for an answer at most; None: it waits for none.
        """
        shared = self.cells.shared_layers(link_takes_all=self._link_takes_all(mode.tokens))
        waits = doorbell is not None and bool(shared)
        bound = int((doorbell or 0.0) * self.ticks) if waits else None
        lowered = Lowering(self.model, self.places, mode, shared, bound).lower()
        layers = [segment.layer for segment in lowered]
        if waits:
            lowered = [Segment([item for segment in lowered for item in segment.items])]
        segments = [fuse(segment) for segment in lowered]
        graphs: list[int] = []
        try:
            for segment in segments:
                self.runtime.load(self.device, kernels_of(segment.items))
                graphs.append(capture(self.runtime, self.stream, segment.items))
            phases, steps = self._laid_out(layers, graphs, mode.tokens)
        except BaseException:
            with suppress(StrataError):
                undo_all(self.runtime, [partial(self.runtime.destroy_graph, g) for g in graphs])
            raise
        dispatch: Dispatch = "doorbell" if waits else "stepped" if shared else "device"
        if not phases:
            return Round(mode, None, tuple(steps), tuple(graphs), dispatch)
        schedule = Schedule.of([*phases, Phase(tuple(steps), leader=True)])
        return Round(mode, schedule, (), tuple(graphs), dispatch)

    def empty(self, experts: Sequence[Expert]) -> None:
        """From the next round on these experts are in no slot. To be called between rounds.

        Rounds that were made before may have no lane for them. Raises DeviceError; then it may be
        called again.
        """
        for expert in experts:
            start, nbytes = self.cells.slot_span(expert)
            at = self.places.regions.at(f"cells {expert.layer}") + start
            self.runtime.fill(at, 0, nbytes, self.stream)
            self.cells.empty(expert)
        self.cells.version += 1

    def _laid_out(
        self, layers: Sequence[int | None], graphs: Sequence[int], tokens: int
    ) -> tuple[list[Phase], list[StepCall]]:
        """The phases of a round, and the leader's steps after the last of them.

        `layers` are those whose mail ends a segment, the last is None. There is a graph for each,
        or one for all.
        """
        by_host = self.cells.host_layers(link_takes_all=self._link_takes_all(tokens))
        phases: list[Phase] = []
        steps: list[StepCall] = []
        end = self.model.shape.layers
        for number, layer in enumerate(layers):
            label = end if layer is None else self.model.routed.index(layer)
            if number < len(graphs):
                steps.append(self.hand.launch(graphs[number], self.stream, label))
            steps.append(self.hand.wait(self._word(label), label))
            if layer is None:
                break
            awaited = self._start_helpers(layer, label, tokens, steps)
            if layer in by_host:
                # where nothing fell to the CPU its threads go on to the next segment at once
                own, rest, count = self.host.work(layer, tokens, self.hand.cell)
                began, ended = self.host.times(layer)
                steps += [own[0], self.hand.stamp(began), *own[1:]]
                phases.append(Phase(tuple(steps), leader=True, unless=count, leaves_out=len(rest)))
                phases += rest
                steps = [self.hand.stamp(ended)]
            steps += awaited
            if len(graphs) < len(layers):
                answer = self.places.exchange.rest.at("answers") + LINE * label
                steps.append(self.hand.answer(answer))
        return phases, steps

    def _start_helpers(
        self, layer: int, label: int, tokens: int, steps: list[StepCall]
    ) -> list[StepCall]:
        """Add the launches of the helpers that hold experts of a layer; the waits for them."""
        awaited = []
        for helper in self.helpers:
            held = helper.layers()
            if layer in held:
                first = layer == next(n for n in self.model.routed if n in held)
                graph = helper.graph(self.model, layer, tokens, first=first)
                steps.append(self.hand.launch(graph, helper.stream, label))
                awaited.append(self.hand.wait(self._word(label, helper.number), label))
        return awaited

    def _link_takes_all(self, tokens: int) -> bool:
        """Whether the link takes every miss with an alias, in a window of so many tokens."""
        return self.split.takes_all(tokens * self.model.shape.top_k)

    def _word(self, ordinal: int, helper: int = 0) -> int:
        exchange = self.places.exchange
        return exchange.rest.at("words") + word(exchange.shape, ordinal, helper)
