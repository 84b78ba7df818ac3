"""The CPU's lane of a round: the experts that no device computes, into page-locked rows.

It runs the CPU backend's own phases on the mail of a layer: the activations that the device sent,
the picks that fell to the CPU (others are -1), and the rows that the combine will read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from attrs import evolve

from strata_core.interfaces import ExpertFiles, Source
from strata_core.kernels.cpu.frame import Frame
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.lower import Lowering
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.serving import Serving
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.storage import Storage
from strata_core.kernels.cpu.workspace import ExpertLayer, Workspace, served_words
from strata_core.kernels.device.exchange import Exchange
from strata_core.kernels.device.workspace import Model, buffer_of, whole


class HostLane:
    """The phases of every routed layer, and the experts' addresses that they read.

    `counts` has for each layer what fell to it in the last round (and 1 if anything did), `stamps`
    when its part began and ended.
    """

    def __init__(
        self,
        model: Model,
        exchange: Exchange,
        experts: ExpertFiles,
        source: Source,
        library: Library,
        threads: int,
    ) -> None:
        self._model = model
        self._library, self._threads = library, threads
        storage = Storage()
        program, limits = model.program, evolve(model.limits, tokens=model.tokens)
        self._frame = Frame(storage, limits, program.rope, program.top_k)
        self.status = storage.zeros((1,), np.uint32)
        self._work = Workspace(storage, limits, program.top_k, self.status)
        self.experts = {}
        for layer, layout in experts.layouts.items():
            table = storage.zeros((experts.count, 3), np.uint64)
            self.experts[layer] = ExpertLayer(layout, table, served_words(storage, experts))
        self.serving = Serving(source, self.experts)
        shape = exchange.shape
        chosen = exchange.array("host", np.int32, shape.layers, shape.entries, 1)
        self._chosen = dict(zip(model.routed, chosen, strict=True))
        self._picks: dict[int, str] = {}
        self._numbers = {}
        for number, op in enumerate(program.ops):
            if op.kernel == "experts":
                self._numbers[whole(op, "layer")] = number
                self._share(number, exchange)
        self._storage = storage
        self._tokens = 0
        self._latch = self.status.data
        self._fine = storage.words([0, 0])
        layers = len(model.routed)
        self.counts = storage.zeros((layers, 2), np.int64)
        self.stamps = storage.zeros((layers, 2), np.int64)
        self._tallies: dict[tuple[int, int], tuple[StepCall, int]] = {}
        self._phases: dict[tuple[int, str], list[Phase]] = {}

    def _share(self, number: int, exchange: Exchange) -> None:
        """Have an op's buffers be the exchange's."""
        op, shape = self._model.program.ops[number], exchange.shape
        x, picks, out = (buffer_of(op, name) for name in ("x", "picks", "out"))
        mail = exchange.array("x", np.float32, shape.tokens, x.width)
        rows = exchange.array("host_rows", np.float32, shape.entries, out.width)
        self._work.buffers |= {x.name: mail, out.name: rows}
        self._picks[whole(op, "layer")] = picks.name

    def begin(self, tokens: int) -> None:
        """A round of a window begins."""
        if tokens != self._tokens:
            self._frame.counts[:] = tokens, tokens * self._model.shape.top_k, 0
            self._tokens = tokens
        self._latch[0] = NOTHING_LATCHED

    def phases(self, layer: int, tokens: int) -> list[Phase]:
        """The phases of a layer, compiled at their first use."""
        mode: Literal["single", "window"] = "single" if tokens == 1 else "window"
        if (layer, mode) not in self._phases:
            self._work.buffers[self._picks[layer]] = self._chosen[layer]
            lowering = Lowering(
                self._model.program,
                mode,
                self._library,
                self._work,
                self._frame,
                {},
                self.experts,
                self._threads,
                self.serving,
            )
            self._phases[layer, mode] = lowering.lower_only(self._numbers[layer])
        return self._phases[layer, mode]

    def work(
        self, layer: int, tokens: int, failure: int
    ) -> tuple[list[StepCall], list[Phase], int]:
        """Steps of the leader's, the phases after them, and the address of a count.

        The first step counts what fell to the CPU in the layer; where that is nothing the phases
        may be left out. Of a single token the leader does itself what has one unit, its
        quantised activations and the order of its picks: the threads meet once less. `failure` is
        the address of the cell in which a round's first failure is latched.
        """
        tally, out = self._tally(layer, failure)
        phases = self.phases(layer, tokens)
        first, alone = phases[0], {self._frame.count("token"), self._frame.one}
        if tokens > 1 or first.leader or {step.units for step in first.steps} - alone:
            return [tally], phases, out
        return [tally, *(evolve(step, units=out + 8) for step in first.steps)], phases[1:], out

    def _tally(self, layer: int, failure: int) -> tuple[StepCall, int]:
        """The step that counts, and where: how many, then 1 if there are any."""
        if (layer, failure) not in self._tallies:
            out = int(self.counts[self._model.routed.index(layer)].ctypes.data)
            picks = int(self._chosen[layer].ctypes.data)
            args = [picks, self._frame.count("pick"), out, failure]
            block = self._storage.words(args)
            step = StepCall(self._library.address(Step("tally")), block, self._frame.one)
            self._tallies[layer, failure] = (step, out)
        return self._tallies[layer, failure]

    def times(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's `stamps`."""
        at = int(self.stamps[self._model.routed.index(layer)].ctypes.data)
        return at, at + 8

    def trial(self, picks: Mapping[int, Sequence[int]]) -> Schedule:
        """Experts of layers for one token, one layer behind the other as in a round.

        Their addresses are known; to be run once, before anything else uses this lane.
        """
        phases: list[Phase] = []
        for layer, chosen in picks.items():
            self._chosen[layer][:] = -1
            self._chosen[layer][: len(chosen), 0] = chosen
            steps, rest, count = self.work(layer, 1, self._fine)
            phases.append(Phase(tuple(steps), leader=True, unless=count, leaves_out=len(rest)))
            phases += rest
        return Schedule.of(phases)

    def try_out(self, pool: Pool, trial: Schedule) -> float:
        """Seconds of a trial; no round may be running."""
        self.begin(1)
        began = time.perf_counter()
        pool.run(trial)
        took = time.perf_counter() - began
        for layer in self.experts.values():
            layer.served[:] = 0
        return took

    def close(self) -> None:
        """End the thread that leads rounds which ask for experts."""
        self.serving.close()
