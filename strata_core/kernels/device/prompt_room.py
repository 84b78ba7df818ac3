"""What prompts of a placed model hold on its first device and in page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from attrs import define, field

from strata_core.cache.lend import lend
from strata_core.cache.slots import SlotPool, slot_bytes
from strata_core.cache.stager import Stager
from strata_core.cache.staging import Staging
from strata_core.cache.waiting import Patience
from strata_core.errors import Degradation
from strata_core.interfaces import Expert, ExpertFiles, Source, StableSource
from strata_core.kernels.cpu.workspace import Dense
from strata_core.kernels.device.exchange import Exchange
from strata_core.kernels.device.lost import Lost
from strata_core.kernels.device.prompt import PromptPath
from strata_core.kernels.device.prompt_bring import Bringing
from strata_core.kernels.device.prompt_loan import Borrowed
from strata_core.kernels.device.prompt_lower import (
    prompt_exchange,
    prompt_model,
    prompt_regions,
)
from strata_core.kernels.device.prompt_waves import most_parts
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.device.segments import Places
from strata_core.kernels.device.workspace import Model
from strata_core.kernels.program import Weight
from strata_core.memory.held import Held, undo_all
from strata_core.plan.lending import WAVE, lendable, own_buffers


@define(eq=False)
class PromptRoom:
    """Filled step by step by a placement, which owns the memory; used by one thread.

    `model` is the model in chunks; `exchange` and `regions` get their addresses from the placement;
    `own` are buffers for experts where the cache has none to lend. `close` frees the events.
    """

    held: Held
    device: int
    model: Model
    exchange: Exchange
    regions: Regions
    own: tuple[int, ...] = ()
    _events: list[int] = field(factory=list, init=False)

    @classmethod
    def of(cls, held: Held, device: int, model: Model, tokens: int) -> PromptRoom:
        """Sizes alone, for chunks of at most `tokens` of a model."""
        chunks = prompt_model(model, tokens)
        return cls(held, device, chunks, prompt_exchange(chunks), prompt_regions(chunks))

    @property
    def largest(self) -> int:
        """Bytes of a slot that any expert fits into."""
        return max((slot_bytes(layout) for layout in self.model.layouts.values()), default=0)

    @property
    def everyone(self) -> int:
        """Experts of all layers."""
        return len(self.model.layouts) * self.model.experts

    def take_buffers(self, cached: int) -> None:
        """Take buffers where a cache of so many experts has none to lend. Raises Refused."""
        ahead = self.regions.nbytes // max(1, self.largest)
        count = own_buffers(cached, self.model.experts, len(self.model.layouts), ahead)
        if count and not self.own:
            nbytes = self.largest * count
            address = self.held.device(self.device, nbytes, "experts of prompts")
            self.own = tuple(address + n * self.largest for n in range(count))

    def take_missing_buffers(self, pool: SlotPool) -> None:
        """Take them beside a cache whose slots are too small for the largest expert.

        Raises Refused.
        """
        if len(pool.places) < self.everyone and not lend(pool, self.largest).buffers:
            self.take_buffers(0)

    def path(
        self,
        streams: tuple[int, int],
        weights: Mapping[Weight, Dense],
        files: ExpertFiles,
        source: Source,
        staging: Staging,
        pool: SlotPool | None,
        bound: float,
        degrade: Callable[[Degradation], None],
    ) -> PromptPath:
        """What computes prompts. `streams`: where the device computes, and one for copies.

        `bound`: seconds of a wait at most, of each layer.
        """
        runtime, (stream, copies) = self.held.runtime, streams
        events = tuple(self._new_event() for _ in staging.addresses)
        cached = len(pool.places) if pool is not None else 0
        most = lendable(cached, self.everyone, len(self.model.layouts))
        patience = Patience(runtime, bound)
        lost = Lost(f"{runtime.label}{self.device}", degrade)
        bringing = Bringing(
            runtime,
            stream,
            Stager(runtime, copies, source, staging, patience, events),
            self.model.layouts,
            lost,
            self._new_event,
            most_parts(max(most, len(self.own)), WAVE),
        )
        borrowed = Borrowed(
            bringing,
            pool,
            self.largest,
            most,
            self.own,
            self.everyone,
            lost,
            patience,
            self._new_event,
            WAVE,
        )
        # its exchange is copied from and to, so that no kernel needs its alias
        facts = runtime.devices()[self.device]
        places = Places(self.regions, self.exchange, 0, weights, facts.shared, facts.matrix)
        return PromptPath(
            runtime,
            self.device,
            stream,
            self.model,
            places,
            files,
            bringing,
            borrowed,
            patience,
            self._new_event,
        )

    def close(self) -> None:
        """Free the events; nothing may be under way."""
        runtime, events = self.held.runtime, list(self._events)
        self._events.clear()
        undo_all(runtime, [partial(runtime.destroy_event, event) for event in events])

    def _new_event(self) -> int:
        event = self.held.runtime.create_event(self.device)
        self._events.append(event)
        return event


def read_from_file(
    source: Source, helped: Collection[Expert], outside: Expert | None
) -> Degradation | None:
    """What to report where prompts read from the file what helpers hold, and nothing else.

    `outside`: an expert that no device holds.
    """
    if not helped or outside is None or not isinstance(source, StableSource):
        return None
    in_ram = []
    for expert in (outside, min(helped)):
        in_ram.append(source.view(expert).in_ram)
        source.release(expert)
    if in_ram != [True, False]:
        return None
    return Degradation(
        what=f"prompts read the {len(helped)} experts that helpers hold from the file",
        why="the first device computes prompts, and the source keeps no copy of those experts",
        cost="a long prompt takes longer by their bytes, once a chunk",
        remedy="choose --source arena, which keeps every expert in memory",
    )
