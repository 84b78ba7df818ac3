"""The device backend: a runtime with its ledger, the host's compiled steps, and what is bound."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from attrs import evolve

from strata_core.abilities import AdaptiveSource
from strata_core.builtin import CPU
from strata_core.cache.adaptive import EXCHANGE_MARGIN, MARGIN, Demand, Timetable
from strata_core.cache.beside import Beside
from strata_core.cache.rank import ranking as evenly
from strata_core.cache.swaps import Swapper
from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import (
    BackendContext,
    Capabilities,
    Executor,
    Expert,
    ExpertFiles,
    Limits,
    Progress,
    Source,
    Weights,
)
from strata_core.kernels.cpu.backend import compiler_of, threads_for
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.device.adapting import Adaptation, DeviceTable
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.correcting import Correction
from strata_core.kernels.device.dispatch import BOUND, Dispatcher
from strata_core.kernels.device.executor import PATIENCE, DeviceExecutor
from strata_core.kernels.device.host_lane import HostLane
from strata_core.kernels.device.layout import MOST_TOKENS
from strata_core.kernels.device.measure import CpuTrials, lanes_together, samples
from strata_core.kernels.device.options import DeviceOptions, read_options
from strata_core.kernels.device.placement import Order, Placement
from strata_core.kernels.device.prompt_lower import own_order
from strata_core.kernels.device.rounds import Hand, Maker
from strata_core.kernels.device.segments import Places
from strata_core.kernels.device.self_test import check_host_lane
from strata_core.kernels.device.split import Split, by_lanes, by_share
from strata_core.kernels.program import Program
from strata_core.memory.ledger import Ledger, vram
from strata_core.runtime import Runtime, StatesLink

_log = logging.getLogger("strata.device")

_UNMEASURED = Degradation(
    what="the CPU computes every expert that no device holds",
    why="the link could not be measured: the device has no room for one expert more, or the copy "
    "failed",
    cost="decoding is slower than with a share of them fetched by the device",
    remedy="make --expert-cache smaller, or give the share with --pcie-frac",
)


def _unlinked(share: float) -> Degradation:
    return Degradation(
        what=f"--pcie-frac {share:g} has no effect",
        why="none of the experts that no device holds lies in page-locked memory that a device can "
        "read",
        cost="the CPU computes all of them",
        remedy="keep them in page-locked memory with --source arena or --resident-experts, or "
        "leave the share out",
    )


class DeviceBackend:
    """Core's backend over any runtime. A plugin's `build` returns it.

    `capabilities` are those of the plugin's kernels, `most_tokens` their largest window, `patience`
    the most seconds that the host waits for a device, `bound` those that a device waits for the
    host's part of a layer, unless rounds were seen to take longer. `library` are the host's
    compiled steps, where the caller has some already. It owns the runtime: `close` closes it.
    """

    def __init__(
        self,
        runtime: Runtime,
        context: BackendContext,
        *,
        capabilities: Capabilities = CPU,
        most_tokens: int = MOST_TOKENS,
        patience: float = PATIENCE,
        bound: float = BOUND,
        library: Library | None = None,
    ) -> None:
        self.runtime = runtime
        devices = runtime.devices()
        self.options: DeviceOptions = read_options(context.options, devices)
        self.ledger = Ledger(devices=1 + max(d.index for d in devices))
        if self.options.budget is not None:
            self.ledger.limit(vram(self.options.device), self.options.budget)
        self._capabilities = capabilities
        self._tokens, self._patience, self._bound = most_tokens, patience, bound
        self._degrade, self._machine = context.degrade, context.machine
        compiler = library.compiler if library else compiler_of(context)
        self._library = library or Library(compiler)
        # one core is left to the thread of the driver
        self._pool = Pool(compiler, threads_for(context, spare=1))
        self._exact, self._own_order = True, False
        self._placements: list[Placement] = []
        self._prepared: Placement | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the kernels can do; exact unless a self-test failed.

        Whether prompts have an order of their own is known once a model is bound.
        """
        exact = self._capabilities.exact and self._exact
        return evolve(self._capabilities, exact=exact, own_order=self._own_order)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that are used, the first one first."""
        return self.options.wanted_devices

    def open_contexts(self, devices: Sequence[int] | None = None) -> None:
        """Open the contexts of devices (None: of all that are used). Raises Refused."""
        for device in self.options.wanted_devices if devices is None else devices:
            self.runtime.open_context(device)

    def prepare(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        limits: Limits,
        progress: Progress,
        ranking: Sequence[Expert] | None = None,
        rates: Sequence[float] = (),
    ) -> Placement:
        """A placement whose steps the caller does; the next `bind` completes it.

        `ranking` orders the experts, the most asked for first (None: spread over the layers);
        `rates` is how often a token asks for each of them, where that is known.
        """
        if ranking is None:
            ranking = evenly(None, experts.layouts, experts.count)
        order = Order(program, weights, experts, limits, progress, ranking, rates)
        made = Placement(
            self.runtime, self.ledger, self.options, order, self._tokens, self._degrade
        )
        self._placements.append(made)
        self._prepared = made
        return made

    def bind(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        progress: Progress,
    ) -> Executor:
        """Do the steps that are left, and make the program runnable. Raises StrataError."""
        placement, self._prepared = self._prepared, None
        if placement is None:
            placement = self.prepare(program, weights, experts, limits, progress)
            self._prepared = None
        try:
            return self._bind(placement, experts, source, progress)
        except BaseException:
            # the error that is on its way says more than one of giving back
            with suppress(StrataError):
                self._drop(placement)
            raise

    def _bind(
        self, placement: Placement, experts: ExpertFiles, source: Source, progress: Progress
    ) -> Executor:
        self.open_contexts()
        placement.take_small_pins()
        placement.test_lanes()
        placement.place_dense()
        placement.place_embedding("device")
        placement.fill_cache(source)
        placement.fill_helpers(source)
        places, cells = placement.places(source)
        executor = self._executor(placement, experts, source, places, cells)
        try:
            progress.start("compiling kernels", 0)
            executor.prepare_first()
            self._exact &= placement.tests.exact
            facts = self.runtime.devices()[placement.device]
            self._own_order |= own_order(placement.model, matrix=facts.matrix)
            self._exact &= self._host_lane_is_exact(placement)
        except BaseException:
            with suppress(StrataError):
                executor.close()
            raise
        finally:
            progress.done()
        return executor

    def _host_lane_is_exact(self, placement: Placement) -> bool:
        """Whether the CPU's lane gives golden rows; what is wrong is told."""
        check = check_host_lane(self._library, self._pool, placement.model)
        for item in check.degradations():
            self._degrade(item)
        return check.exact

    def _executor(
        self,
        placement: Placement,
        experts: ExpertFiles,
        source: Source,
        places: Places,
        cells: Cells,
    ) -> DeviceExecutor:
        """The executor, which ends what it is made of; where it is not made, that is ended here."""
        exchange = placement.exchange
        hand = Hand(
            self._library,
            self.runtime.graph_launcher,
            exchange.frame.at("round"),
            self._patience,
            np.zeros(2, np.int64),
        )
        prompts = placement.prompt_path(source, self._patience)
        host = HostLane(
            placement.model, exchange, experts, source, self._library, self._pool.threads
        )
        adaptation: Adaptation | None = None
        try:
            split = self._split(placement, cells, host)
            placement.put_split(split.table)
            adaptation = self._adaptation(placement, experts, source, cells, host)
            dispatcher = self._dispatcher(placement.device, source, cells)
            maker = Maker(
                self.runtime,
                placement.device,
                placement.stream,
                placement.model,
                places,
                cells,
                placement.helpers,
                host,
                hand,
                split,
                dispatcher.ticks,
            )
            return DeviceExecutor(
                maker,
                prompts,
                placement.rooms,
                experts,
                self._library,
                self._pool,
                lambda: self._drop(placement),
                dispatcher,
                adaptation,
                self._correction(placement, host, hand, split),
            )
        except BaseException:
            if adaptation is not None:
                with suppress(StrataError):
                    adaptation.close()
            host.close()
            raise

    def _correction(
        self, placement: Placement, host: HostLane, hand: Hand, split: Split
    ) -> Correction | None:
        """What corrects a split that was measured; a simulated link has no time to go by."""
        if split.cpu is None or isinstance(self.runtime, StatesLink):
            return None
        layouts = [placement.model.layouts[layer].nbytes for layer in placement.model.routed]
        nbytes = sum(layouts) / len(layouts)
        top_k = placement.model.shape.top_k
        return Correction(host.stamps, host.counts, hand.ticks, nbytes, top_k)

    def _dispatcher(self, device: int, source: Source, cells: Cells) -> Dispatcher:
        return Dispatcher.of(
            self._machine,
            self.runtime,
            device,
            source,
            cells.away(),
            self.options.dispatch,
            self._bound,
            self._degrade,
        )

    def _adaptation(
        self,
        placement: Placement,
        experts: ExpertFiles,
        source: Source,
        cells: Cells,
        host: HostLane,
    ) -> Adaptation | None:
        """What keeps the first device's cache in step; None where nothing is to move."""
        moving, pool = placement.moving, placement.pool
        if moving is None or pool is None:
            return None
        layouts = {layer: experts.layouts[layer] for layer in placement.model.routed}
        demand = Demand.of(layouts, experts.count, placement.order.ranking, placement.order.rates)
        for expert in placement.resident:
            demand.bar(expert, barred=expert not in pool.places)
        demand.put_inside(pool.places)
        table = DeviceTable(
            runtime=self.runtime,
            device=placement.device,
            stream=placement.stream,
            patience=self._patience,
            cells=cells,
            mirror=moving.mirror,
            target=moving.target,
            nbytes=moving.nbytes,
            layouts=experts.layouts,
            source=source,
            host=host,
            linked=bool(placement.options.link_share),
        )
        margin = EXCHANGE_MARGIN if isinstance(source, AdaptiveSource) else MARGIN
        jobs = Beside("strata-beside")
        timetable = Timetable(self.options.pace, demand, jobs, margin)
        # last, for it has threads, streams and events
        swapper = Swapper(
            runtime=self.runtime,
            pool=pool,
            layouts=experts.layouts,
            source=source,
            table=table,
            policy=timetable,
            jobs=jobs,
            degrade=self._degrade,
            patience=self._patience,
            buffers=list(moving.buffers),
        )
        return Adaptation(timetable, swapper, table, jobs)

    def _split(self, placement: Placement, cells: Cells, host: HostLane) -> Split:
        """The split of misses that was asked for, or the one that the lanes' rates make best."""
        asked, shape = placement.options.link_share, placement.model.shape
        if asked != "auto":
            if asked and cells.cannot_link():
                self._degrade(_unlinked(asked))
            return Split(table=by_share(shape.entries, asked), asked=asked)
        none = Split(table=by_share(shape.entries, 0.0), asked=asked)
        host.serving.refresh()
        over = samples(cells, host)
        if not over:
            return none
        trials = CpuTrials(host, self._pool, over, shape.top_k)
        found = lanes_together(
            self.runtime, placement.held, placement.device, placement.stream, trials
        )
        if found is None:
            self._degrade(_UNMEASURED)
            return none
        link, cpu = found.link, found.cpu
        table = by_lanes(shape.entries, int(trials.nbytes), link, cpu)
        _log.info(
            "the link moves %.1f GB/s beside the CPU's %.1f GB/s: of 1 to %d misses of a layer "
            "%s go over the link",
            link.rate / 1e9,
            cpu.rate / 1e9,
            shape.top_k,
            ", ".join(map(str, table[1 : shape.top_k + 1].tolist())),
        )
        return Split(table=table, asked=asked, link=link, cpu=cpu)

    def _drop(self, placement: Placement) -> None:
        if placement in self._placements:
            self._placements.remove(placement)
            placement.close()

    def close(self) -> None:
        """Give back what is left, end the pool's threads, close the runtime."""
        try:
            for placement in list(self._placements):
                self._drop(placement)
        finally:
            self._pool.close()
            self.runtime.close()
