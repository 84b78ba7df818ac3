"""Prompts on a device: chunks of many tokens, experts that are not in VRAM brought once a chunk.

Experts come through two halves of buffers: while one wave is computed, the next one is copied on a
stream of its own, of the next layer too where the picks need not be known. The buffers are slots
that the cache lends; they are filled again behind the prompt, so that decoding finds what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from strata_core.cache.lend import Loan, lend
from strata_core.cache.slots import SlotPool
from strata_core.cache.stager import Stager, await_event
from strata_core.errors import DeviceError, EngineError, StrataError
from strata_core.interfaces import Expert, ExpertFiles, Window
from strata_core.kernels.cpu.not_finite import not_finite
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.capture import kernels_of, put
from strata_core.kernels.device.layout import STATUS_BYTES, WAVE
from strata_core.kernels.device.lost import Lost
from strata_core.kernels.device.prompt_lower import HEAD_ROWS, PromptLowering
from strata_core.kernels.device.prompt_waves import Halves, Wave, asks_for_all, plan_waves
from strata_core.kernels.device.segments import Copy, Item, Places, Segment
from strata_core.kernels.device.workspace import Model
from strata_core.runtime import Runtime

KEPT = 4
"""Lengths of chunks whose launches are kept."""


@frozen(eq=False)
class _Chunk:
    """A length, lowered: segments, and what computes a wave."""

    lowering: PromptLowering
    segments: list[Segment]


@define(eq=False)
class _Events:
    """`filled` and `free` by half; `routed`: a layer's picks are there; `end`; `refilled`."""

    filled: tuple[int, int]
    free: tuple[int, int]
    routed: int
    end: int
    refilled: int

    @classmethod
    def make(cls, new: Callable[[], int]) -> _Events:
        """New ones. Raises DeviceError."""
        return cls((new(), new()), (new(), new()), new(), new(), new())


@define(eq=False)
class PromptPath:
    """Computes chunks of one sequence; used by one thread, between the rounds of decoding.

    `pool` are the device's slots, which lend buffers of `largest` bytes from a prompt's first chunk
    to the next `restore`, while nobody else may change them; `own` are buffers where they have none
    to lend; `new_event` gives events of the device that whoever closes the placement frees. `lost`
    are experts that could not come back: their slots are empty, which whoever makes rounds has to
    see to. After an error the window's sequence holds no valid state; the next call first waits
    until the device is idle.
    """

    runtime: Runtime
    device: int
    stream: int
    model: Model
    places: Places
    files: ExpertFiles
    stager: Stager
    pool: SlotPool | None
    largest: int
    own: tuple[int, ...]
    bound: float
    new_event: Callable[[], int]
    lost: Lost
    counts: dict[str, int] = field(factory=lambda: dict.fromkeys(("entries", "bytes"), 0))
    refills: dict[str, int] = field(factory=lambda: dict.fromkeys(("experts", "bytes"), 0))
    _events: _Events = field(init=False)
    _chunks: dict[int, _Chunk] = field(factory=dict, init=False)
    _loan: Loan | None = field(default=None, init=False)
    _halves: Halves = field(factory=lambda: Halves(()), init=False)
    _slots: dict[Expert, int] = field(factory=dict, init=False)
    _waves: dict[int, list[Wave]] = field(factory=dict, init=False)
    _lent: bool = field(default=False, init=False)
    _refilling: bool = field(default=False, init=False)
    _unsettled: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._events = _Events.make(self.new_event)

    # running

    def prepare(self) -> None:
        """Load the kernels, so that nothing is compiled or allocated in a prompt."""
        chunk = self._lowered(self.model.tokens)
        items = [item for segment in chunk.segments for item in segment.items]
        for layer in self.model.routed:
            items += chunk.lowering.wave(layer, 0, 1)
        items += PromptLowering(self.model, self.places, self.model.tokens, 1).head(0)
        self.runtime.load(self.device, kernels_of(items))

    def run(
        self, window: Window, places: Sequence[Sequence[int]], number: int
    ) -> NDArray[np.float32]:
        """Compute one chunk; `places` are those of its tokens. Logits of the wanted rows."""
        try:
            self.settle()
            self._unsettled = True
            logits = self._chunk(window, places, number)
            self._unsettled = False
        except BaseException:
            self._unsettled = True
            raise
        return logits

    def restore(self) -> None:
        """Have every lent slot hold its expert again, in the order of the stream, or be `lost`."""
        self.settle()
        if self._lent:
            self._refill()
        if self._refilling:
            self.runtime.wait(self.stream, self._events.refilled)
            self._refilling = False
        self._loan = None

    def settle(self) -> None:
        """After a failure: wait, bounded, until the device is idle; give back what is held."""
        if not self._unsettled:
            return
        self.runtime.take_error()
        for stream in (self.stager.stream, self.stream):
            self.runtime.record(self._events.end, stream)
            await_event(self.runtime, self._events.end, self.bound, "a prompt that failed")
        self.stager.abandon()
        self._unsettled = False

    def counters(self) -> dict[str, dict[str, int]]:
        """`prompt`: experts that were brought for prompts; `refill`: into slots they had lent."""
        brought, back = self.stager, self.refills
        count = brought.experts - back["experts"]
        return {
            "prompt": {"experts": count, "bytes": brought.nbytes - back["bytes"]},
            "refill": dict(back),
        }

    def close(self) -> None:
        """Wait, bounded, until the device is idle, and give back what is held."""
        self._unsettled = True
        with suppress(StrataError):
            self.settle()
        self.stager.abandon()

    # a chunk

    def _chunk(
        self, window: Window, places: Sequence[Sequence[int]], number: int
    ) -> NDArray[np.float32]:
        tokens = len(window.ids)
        chunk = self._lowered(tokens)
        self._borrow()
        self.places.exchange.fill_frame(number, window, places, self.model.program)
        first, rest = chunk.segments[0], chunk.segments[1:]
        if asks_for_all(tokens, self.model.shape.top_k, self.model.experts):
            if not self._waves:
                self._plan_all()
            first = Segment([*first.items, chunk.lowering.table(None)], first.layer)
        else:
            self._waves.clear()
        for segment in (first, *rest):
            self._put(segment.items)
            if segment.layer is not None:
                self._experts(chunk, segment.layer)
        logits = self._heads(chunk, window)
        self._count()
        if len(window.logits_rows) and self._lent:
            self._refill()
        return logits

    def _lowered(self, tokens: int) -> _Chunk:
        if tokens not in self._chunks:
            lowering = PromptLowering(self.model, self.places, tokens)
            if len(self._chunks) >= KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[tokens] = _Chunk(lowering, lowering.chunk())
        return self._chunks[tokens]

    def _put(self, items: Sequence[Item]) -> None:
        for item in items:
            put(self.runtime, self.stream, item)

    def _borrow(self) -> None:
        """Find out which slots are lent and which keep their experts, at a prompt's beginning."""
        self._refilling = False  # copies back come before those of this chunk, in their stream
        if self._loan is None:
            places = dict(self.pool.places) if self.pool is not None else {}
            everyone = len(self.model.layouts) * self.model.experts
            loan = Loan()
            if len(places) < everyone:
                loan = lend(self.pool, self.largest, self.lost.vacated)
            buffers = loan.buffers or self.own
            if not buffers and len(places) < everyone:
                raise EngineError(
                    "there are no buffers for the experts of a prompt",
                    f"none of {len(places)} slots is as large as the largest expert",
                    "give another number of experts with --expert-cache",
                )
            for expert in loan.experts:
                del places[expert]
            self._loan, self._halves, self._slots = loan, Halves.of(buffers), places
            self._waves.clear()
        self._lent = bool(self._loan.experts)

    def _plan_all(self) -> None:
        turn = 0
        for layer in self.model.routed:
            self._waves[layer], turn = self._plan(layer, range(self.model.experts), turn)

    def _plan(self, layer: int, needed: Sequence[int], turn: int) -> tuple[list[Wave], int]:
        layout, table = self.model.layouts[layer], self._table(layer)
        return plan_waves(layer, layout, needed, self._slots, self._halves, turn, table)

    def _experts(self, chunk: _Chunk, layer: int) -> None:
        """Bring and compute a layer's experts: all of them, or those that were picked."""
        waves = self._waves.get(layer)
        if waves is None:
            self.runtime.record(self._events.routed, self.stream)
            await_event(self.runtime, self._events.routed, self.bound, f"layer {layer}")
            needed = np.flatnonzero(np.diff(self._starts(layer))).tolist()
            waves, _ = self._plan(layer, needed, 0)
            self._put([chunk.lowering.table(layer)])
        begun = self._begin(layer, [index for wave in waves for index, _ in wave.moves])
        for wave in waves:
            if wave.half is not None:
                self._bring(layer, wave, wave.half, begun=begun)
            self._put(chunk.lowering.wave(layer, wave.begin, wave.count))
            if wave.half is not None:
                self.runtime.record(self._events.free[wave.half], self.stream)

    def _bring(self, layer: int, wave: Wave, half: int, *, begun: bool) -> None:
        """Copy a wave's experts once its half is free; what computes them waits for that.

        Raises what the source raises for an expert that was picked. The buffer of another one may
        hold anything: a wave computes what was picked alone.
        """
        stager = self.stager
        self.runtime.wait(stager.stream, self._events.free[half])
        for index, address in wave.moves:
            expert = Expert(layer, index)
            error = self._send(expert, address, begun=begun)
            if error is not None:
                if self._asked(expert):
                    raise error
                self.lost.unread(expert, error)
        self.runtime.record(self._events.filled[half], stager.stream)
        stager.let_go(self._events.filled[half])
        self.runtime.wait(self.stream, self._events.filled[half])

    def _begin(self, layer: int, experts: Sequence[int]) -> bool:
        """Tell the source which experts come next; whether it took that for all of them."""
        try:
            self.stager.begin(layer, experts)
        except Exception:  # noqa: BLE001 - each is asked for by itself, and its error is told
            return False
        return True

    def _send(self, expert: Expert, address: int, *, begun: bool) -> Exception | None:
        """Copy an expert to an address; the error where the source had one.

        Raises only what is the device's.
        """
        try:
            if not begun:
                self.stager.begin(expert.layer, [expert.index])
            self.stager.send(expert, self.model.layouts[expert.layer], address)
        except (DeviceError, EngineError):
            raise
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            return error
        return None

    def _asked(self, expert: Expert) -> bool:
        """Whether the chunk picked an expert of the layer that is computed next; waits for that."""
        self.runtime.record(self._events.routed, self.stream)
        what = f"layer {expert.layer}"
        await_event(self.runtime, self._events.routed, self.bound, what)
        return bool(self.picked(expert.layer)[expert.index])

    def _heads(self, chunk: _Chunk, window: Window) -> NDArray[np.float32]:
        """Logits of the wanted rows, some at a time; the end of the chunk is awaited."""
        wanted = len(window.logits_rows)
        exchange, vocabulary = self.places.exchange, self.model.program.vocabulary
        found = np.empty((wanted, vocabulary), np.float32)
        words = exchange.array("result", np.float32, exchange.rest.size("result") // 4)
        if not wanted:
            source = self.places.regions.at("result")
            self._put([Copy(exchange.rest.at("result"), source, 4)])
            self._end(chunk, words)
        for first in range(0, wanted, HEAD_ROWS):
            count = min(HEAD_ROWS, wanted - first)
            self._put(PromptLowering(self.model, self.places, len(window.ids), count).head(first))
            self._end(chunk, words)
            rows = words[STATUS_BYTES // 4 :][: count * vocabulary].reshape(count, vocabulary)
            found[first : first + count] = rows
        return found

    def _end(self, chunk: _Chunk, words: NDArray[np.float32]) -> None:
        self.runtime.record(self._events.end, self.stream)
        bound = self.bound * len(chunk.segments)
        await_event(self.runtime, self._events.end, bound, "a chunk of a prompt")
        latched = int(words.view(np.uint32)[0])
        if latched != NOTHING_LATCHED:
            raise not_finite(self.model.program, self.files, latched)

    # behind a prompt

    def _refill(self) -> None:
        """Copy the lent slots' experts back, behind everything that used their buffers.

        One that the source has an error with loses its slot. Raises only what is the device's.
        """
        assert self.pool is not None, "only a pool lends"
        assert self._loan is not None, "what was lent is known"
        stager, before = self.stager, (self.stager.experts, self.stager.nbytes)
        for event in self._events.free:
            self.runtime.wait(stager.stream, event)
        self._unsettled = True
        by_layer: dict[int, list[int]] = {}
        for expert in self._loan.experts:
            by_layer.setdefault(expert.layer, []).append(expert.index)
        for layer, experts in by_layer.items():
            begun = self._begin(layer, experts)
            for index in experts:
                expert = Expert(layer, index)
                error = self._send(expert, self.pool.places[expert], begun=begun)
                if error is not None:
                    self.lost.add(expert, self.pool.places.pop(expert), error)
            self.runtime.record(self._events.refilled, stager.stream)
            stager.let_go(self._events.refilled)
        self._unsettled = False
        back = tuple(e for e in self._loan.experts if e in self.pool.places)
        self._loan = evolve(self._loan, experts=back)
        self._lent, self._refilling = False, True
        self.refills["experts"] += stager.experts - before[0]
        self.refills["bytes"] += stager.nbytes - before[1]

    # accounts

    def picked(self, layer: int) -> NDArray[np.int32]:
        """How often each expert of a layer was chosen in the latest chunk."""
        return np.diff(self._starts(layer))

    def _count(self) -> None:
        """Add the entries whose experts were in slots."""
        entries = {layer: self.picked(layer) for layer in self.model.routed}
        for expert in self._slots:
            hits = int(entries[expert.layer][expert.index])
            self.counts["entries"] += hits
            self.counts["bytes"] += hits * self.model.layouts[expert.layer].nbytes

    def _starts(self, layer: int) -> NDArray[np.int32]:
        shape = (len(self.model.routed), self.model.experts + 1)
        starts = self.places.exchange.array("starts", np.int32, *shape)
        found: NDArray[np.int32] = starts[self.model.routed.index(layer)]
        return found

    def _table(self, layer: int) -> NDArray[Any]:
        shape = (len(self.model.routed), self.model.experts)
        tables = self.places.exchange.array("waves", WAVE, *shape)
        table: NDArray[Any] = tables[self.model.routed.index(layer)]
        return table
