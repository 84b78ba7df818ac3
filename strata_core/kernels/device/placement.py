"""Putting a model on devices, step by step, in an order that a start policy may change.

Plain order: small pins, self-test, dense weights, embedding, cache, helpers. A step that was not
done when the program is bound is done then. Whatever a step took is given back by `close`, also
after a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from attrs import define, evolve, field, frozen

from strata_core.abilities import AdaptiveSource
from strata_core.cache.amount import Wish, scarcity
from strata_core.cache.fill import fill_slots
from strata_core.cache.room import SlotRoom
from strata_core.cache.slots import SlotPool
from strata_core.cache.staging import Staging
from strata_core.errors import Degradation
from strata_core.interfaces import (
    Expert,
    ExpertFiles,
    Limits,
    Progress,
    Source,
    Weights,
)
from strata_core.kernels.cpu.workspace import Dense
from strata_core.kernels.device.adapting import reachable
from strata_core.kernels.device.cells import Aliases, Cells
from strata_core.kernels.device.dense import (
    Stored,
    Where,
    lone_embedding,
    place_embedding,
    place_weights,
    read_weights,
)
from strata_core.kernels.device.exchange import Exchange, Shape
from strata_core.kernels.device.helper import Helper
from strata_core.kernels.device.kv import KvRooms
from strata_core.kernels.device.moving import Moving
from strata_core.kernels.device.options import DeviceOptions
from strata_core.kernels.device.prompt import PromptPath
from strata_core.kernels.device.prompt_room import PromptRoom, read_from_file
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.device.segments import Places
from strata_core.kernels.device.self_test import DeviceTests
from strata_core.kernels.device.split import Table
from strata_core.kernels.device.workspace import (
    Model,
    cells_bytes,
    cells_span,
    helper_regions,
    main_regions,
)
from strata_core.kernels.program import Program, Weight
from strata_core.memory.held import Held, undo_all
from strata_core.memory.ledger import Ledger
from strata_core.runtime import Runtime

_log = logging.getLogger("strata.device")


@frozen(eq=False)
class Order:
    """A model to place: what `bind` is given, and the experts, the most asked for first.

    `rates` is how often a token asks for each of `ranking`; empty where that is not known.
    """

    program: Program
    weights: Weights
    experts: ExpertFiles
    limits: Limits
    progress: Progress
    ranking: Sequence[Expert]
    rates: Sequence[float] = ()


@define(eq=False)
class Placement:
    """What one model holds on the devices of a runtime. Used by one thread."""

    runtime: Runtime
    ledger: Ledger
    options: DeviceOptions
    order: Order
    tokens: int
    degrade: Callable[[Degradation], None]
    held: Held = field(init=False)
    model: Model = field(init=False)
    exchange: Exchange = field(init=False)
    rooms: KvRooms = field(init=False)
    regions: Regions | None = field(default=None, init=False)
    pool: SlotPool | None = field(default=None, init=False)
    helpers: list[Helper] = field(factory=list, init=False)
    stream: int = field(default=0, init=False)
    prompts: PromptRoom = field(init=False)
    moving: Moving | None = field(default=None, init=False)
    tests: DeviceTests = field(init=False)
    _stored: dict[Weight, Stored] = field(init=False)
    _dense: dict[Weight, Dense] = field(factory=dict, init=False)
    _staging: Staging | None = field(default=None, init=False)
    _streams: list[int] = field(factory=list, init=False)
    _filled: set[str] = field(factory=set, init=False)
    _mirror_at: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        order = self.order
        self.held = Held(self.runtime, self.ledger)
        self._stored = {one.weight: one for one in read_weights(order.program, order.weights)}
        shape = Shape.of(order.program, min(self.tokens, order.limits.tokens))
        self.model = Model(
            program=order.program,
            layouts=order.experts.layouts,
            experts=order.experts.count,
            types={w: one.type for w, one in self._stored.items()},
            limits=order.limits,
            shape=shape,
        )
        self.exchange = Exchange.plan(shape)
        self.tests = DeviceTests(
            self.held,
            self.device,
            self.model,
            self.exchange,
            tuple(self._stored.values()),
            order.progress,
            self.degrade,
        )
        self.prompts = PromptRoom.of(self.held, self.device, self.model, order.limits.tokens)
        self.rooms = KvRooms(self.held, self.device, order.program, order.limits)

    @property
    def device(self) -> int:
        """The device that computes the model."""
        return self.options.device

    @property
    def resident(self) -> frozenset[Expert]:
        """Experts that have a slot on some device, as far as the caches were made."""
        pools = [self.pool] if self.pool else []
        pools += [helper.pool for helper in self.helpers]
        return frozenset(expert for pool in pools for expert in pool.places)

    # steps

    def take_small_pins(self) -> None:
        """Page-lock what host and devices exchange, and the buffers for filling. Raises Refused."""
        if self.exchange.address:
            return
        table = cells_bytes(self.model) if self.options.pace.at_once else 0
        nbytes = self.exchange.nbytes + table + self.prompts.exchange.nbytes
        address = self.held.pinned(nbytes, "what the host and the devices exchange")
        self.exchange.settle(address)
        self._mirror_at = address + self.exchange.nbytes
        self.prompts.exchange.settle(self._mirror_at + table)
        self._ready_staging()

    def test_lanes(self, devices: Sequence[int] | None = None) -> None:
        """Have devices (None: all that are used) compute golden rows, each once.

        A lane with other bits is told of; that of the link is left out. Raises Refused, DeviceError
        where a device does not compute at all.
        """
        self.take_small_pins()
        for device in self.options.wanted_devices if devices is None else devices:
            link = device == self.device and bool(self.options.link_share)
            if not self.tests.run(device, self._ready_staging(), link=link):
                self.options = evolve(self.options, link_share=0.0)

    def place_dense(self) -> None:
        """Put dense weights (but a lone embedding), the workspace and one sequence's KV in place.

        Raises Refused, CheckpointError, UsageError.
        """
        if self.regions is not None:
            return
        self.stream = self._new_stream(self.device)
        lone = lone_embedding(self.order.program)
        stored = [one for weight, one in self._stored.items() if weight != lone]
        staging, progress = self._ready_staging(), self.order.progress
        self._dense |= place_weights(self.held, self.device, stored, staging, progress)
        regions = main_regions(self.model, self.exchange)
        self._settle(regions, self.device, self.stream, "buffers of activations")
        self._settle(self.prompts.regions, self.device, self.stream, "buffers of prompts")
        self.rooms.ready()
        self.regions = regions

    def place_embedding(self, where: Where) -> None:
        """Put a lone embedding in page-locked memory or on the device; a tied one is there."""
        lone = lone_embedding(self.order.program)
        if lone is None or lone in self._dense:
            return
        self._dense[lone] = place_embedding(
            self.held,
            self.device,
            self._stored[lone],
            where,
            self._ready_staging(),
            self.order.progress,
            self.degrade,
        )

    def make_cache(self) -> None:
        """Take the slots of the first device's cache, empty. Raises Refused."""
        if self.pool is None:
            self.place_dense()
            self.prompts.take_buffers(self._expected())
            self.pool = self._slots(self.device, self.options.cache, self.options.pace.at_once)
            self.prompts.take_missing_buffers(self.pool)
            self._take_moving()

    def fill_cache(self, source: Source) -> None:
        """Read the best experts into the first device's slots. Raises Refused, StrataError."""
        self.make_cache()
        assert self.pool is not None
        self._fill(self.pool, source, self.options.cache)

    def prompt_path(self, source: Source, bound: float) -> PromptPath:
        """What computes prompts, once all steps are done; `bound`: seconds of a layer at most."""
        helped = {expert for helper in self.helpers for expert in helper.pool.places}
        resident = self.resident
        outside = next((e for e in self.order.ranking if e not in resident), None)
        slow = read_from_file(source, helped, outside)
        if slow is not None:
            self.degrade(slow)
        return self.prompts.path(
            (self.stream, self._new_stream(self.device)),
            self._dense,
            self.order.experts,
            source,
            self._ready_staging(),
            self.pool,
            bound,
            self.degrade,
        )

    def make_helpers(self, devices: Sequence[int] | None = None) -> None:
        """Take slots and workspace of helpers, empty: of those on `devices` (None: of all).

        Raises Refused.
        """
        self.make_cache()
        made = {helper.number for helper in self.helpers}
        for number in self.options.wanted_helpers:
            wanted = devices is None or self.options.helpers[number - 1] in devices
            if wanted and number not in made:
                self.helpers.append(self._helper(number))

    def fill_helpers(self, source: Source) -> None:
        """Read the next best experts into the helpers' slots. Raises Refused, StrataError."""
        self.make_helpers()
        for helper in self.helpers:
            wish = self.options.helper_caches[helper.number - 1]
            if not self._fill(helper.pool, source, wish):
                continue
            _log.info(
                "%s%d: %d additional experts, %.2f GiB; results return through pinned host rows",
                self.runtime.label,
                helper.device,
                len(helper.pool.places),
                helper.pool.nbytes / 2**30,
            )

    def places(self, source: Source) -> tuple[Places, Cells]:
        """Where everything is, once all steps are done; the tables are on the devices."""
        assert self.regions is not None
        self.take_small_pins()
        staging = self._ready_staging()
        pools = {helper.number: helper.pool for helper in self.helpers}
        layouts, count = self.model.layouts, self.model.experts
        cells = Cells.make(layouts, count, self.pool, pools, self._aliases(source))
        if self.moving is not None:
            self.moving.take_over(cells, self.regions, fixed=not isinstance(source, AdaptiveSource))
        cells.put(staging, self.regions, self.device)
        for helper in self.helpers:
            alias = self.exchange.alias(self.runtime, helper.device)
            helper.places = evolve(helper.places, exchange_alias=alias)
            own = Cells.make(layouts, count, helper.pool)
            own.put(staging, helper.places.regions, helper.device)
        staging.drain()
        alias = self.exchange.alias(self.runtime, self.device)
        room = self.runtime.devices()[self.device].shared
        return Places(self.regions, self.exchange, alias, self._dense, room), cells

    def put_split(self, table: Table) -> None:
        """Have the misses be split by a table; between rounds only."""
        assert self.regions is not None
        staging = self._ready_staging()
        staging.put(self.device, self.regions.at("share"), table.view(np.uint8))
        staging.drain()

    def close(self) -> None:
        """Give everything back, whatever fails of it. Calling it again does nothing.

        Nothing may be running but copies and fills of steps that failed.
        """
        staging, self._staging = self._staging, None
        streams, self._streams = self._streams, []
        steps: list[Callable[[], None]] = []
        # a prompt's copies may come from the buffers of the staging
        steps += [partial(self.runtime.synchronize, stream) for stream in streams]
        steps += [staging.close] if staging else []
        steps += [self.prompts.close]
        steps += [partial(self.runtime.destroy_stream, stream) for stream in streams]
        undo_all(self.runtime, [*steps, self.held.close])

    # parts of the steps

    def _ready_staging(self) -> Staging:
        """The buffers for filling, taken when they are first needed. Raises Refused."""
        if self._staging is None:
            largest = max((x.nbytes for x in self.model.layouts.values()), default=0)
            self._staging = Staging.make(self.held, largest)
        return self._staging

    def _take_moving(self) -> None:
        """Take what experts that change places need of the host. Raises Refused."""
        if self.pool is None or not any(self.pool.spare.values()):
            return
        assert self.regions is not None, "the dense weights come first"
        self.take_small_pins()
        span, staging = cells_span(self.regions, self.model), self._ready_staging()
        self.moving = Moving.take(
            self.held, self.device, self._mirror_at, span, staging, self.degrade
        )

    def _new_stream(self, device: int) -> int:
        stream = self.runtime.create_stream(device)
        self._streams.append(stream)
        return stream

    def _settle(self, regions: Regions, device: int, stream: int, purpose: str) -> None:
        """Give regions their memory, zeroed."""
        regions.base = self.held.device(device, regions.nbytes, purpose)
        self.runtime.fill(regions.base, 0, regions.nbytes, stream)
        self.runtime.synchronize(stream)

    @property
    def _room(self) -> SlotRoom:
        return SlotRoom(self.held, self.model.layouts, self.model.experts)

    def _expected(self) -> int:
        """Experts that the first device's cache is going to hold."""
        return len(self._room.choose(self.device, self.options.cache, self.order.ranking))

    def _slots(self, device: int, wish: Wish, at_once: int = 0) -> SlotPool:
        resident = self.resident
        ranking = [e for e in self.order.ranking if e not in resident]
        return self._room.take(device, wish, ranking, at_once, self.degrade)

    def _fill(self, pool: SlotPool, source: Source, wish: Wish) -> bool:
        """Fill a pool that was not yet; whether it was."""
        label = f"{self.runtime.label}{pool.device}"
        if label in self._filled:
            return False
        self._filled.add(label)
        fill_slots(
            pool,
            self.model.layouts,
            source,
            self._ready_staging(),
            self.order.progress,
            f"filling the expert cache of {label}",
        )
        scarce = scarcity(self.runtime, pool.device, wish.flag) if pool.places else None
        if scarce is not None:
            self.degrade(scarce)
        return True

    def _helper(self, number: int) -> Helper:
        device = self.options.helpers[number - 1]
        self.test_lanes((device,))  # its context may have come late
        stream = self._new_stream(device)
        regions = helper_regions(self.model)
        self._settle(regions, device, stream, "a helper's buffers")
        pool = self._slots(device, self.options.helper_caches[number - 1])
        # its view of the exchange follows when that is there
        places = Places(regions, self.exchange, 0, {}, self.runtime.devices()[device].shared)
        return Helper(self.runtime, number, device, stream, pool, places)

    def _aliases(self, source: Source) -> Aliases:
        """Experts that the first device can read over the link, where it is to read any."""
        if not self.options.link_share:
            return {}
        # what is in a slot may leave it, and is then where it is now
        stays = self.moving is not None and not isinstance(source, AdaptiveSource)
        return reachable(source, self.model.layouts, frozenset() if stays else self.resident)
