"""Prompts on a device: chunks of many tokens, experts that are not in VRAM brought once a chunk.

Experts come through a ring of buffers, in waves: while one is computed, the next ones are copied on
a stream of its own, of the next layers too where the picks need not be known. The buffers are slots
that the cache lends; they are filled again behind the prompt, so that decoding finds what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.cache.waiting import Patience
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, ExpertFiles, Window
from strata_core.kernels.cpu.not_finite import not_finite
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.capture import kernels_of, put
from strata_core.kernels.device.chunk_times import ChunkTimes
from strata_core.kernels.device.layout import MOST_TOKENS, STATUS_BYTES, WAVE
from strata_core.kernels.device.lost import Lost
from strata_core.kernels.device.prompt_bring import Bringing
from strata_core.kernels.device.prompt_loan import Borrowed
from strata_core.kernels.device.prompt_lower import HEAD_ROWS, PromptLowering
from strata_core.kernels.device.prompt_timeline import Timed, Untimed
from strata_core.kernels.device.prompt_waves import Wave, asks_for_all, plan_waves
from strata_core.kernels.device.segments import Copy, Item, Places, Segment
from strata_core.kernels.device.workspace import Model
from strata_core.runtime import Runtime

KEPT = 4
"""Lengths of chunks whose launches are kept."""


_UNTIMED = Untimed()


@frozen(eq=False)
class _Chunk:
    """A length, lowered: segments, and what computes a wave."""

    lowering: PromptLowering
    segments: list[Segment]


@define(eq=False)
class PromptPath:
    """Computes chunks of one sequence; used by one thread, between the rounds of decoding.

    `borrowed` are the device's slots that prompts use from their first chunk to the next `restore`,
    while nobody else may change them; `bringing` fills them. `new_event` gives events of the device
    that whoever closes the placement frees. Experts that could not come back are in `lost`: their
    slots are empty, which whoever makes rounds has to see to. After an error the window's sequence
    holds no valid state; the next call first waits until the device is idle.
    """

    runtime: Runtime
    device: int
    stream: int
    model: Model
    places: Places
    files: ExpertFiles
    bringing: Bringing
    borrowed: Borrowed
    patience: Patience
    new_event: Callable[[], int]
    counts: dict[str, int] = field(factory=lambda: dict.fromkeys(("entries", "bytes"), 0))
    _routed: int = field(init=False)
    _ended: int = field(init=False)
    _chunks: dict[int, _Chunk] = field(factory=dict, init=False)
    _waves: dict[int, list[Wave]] = field(factory=dict, init=False)
    _unsettled: bool = field(default=False, init=False)
    _timed: Timed | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._routed, self._ended = self.new_event(), self.new_event()
        self.bringing.asked = self._asked

    @property
    def lost(self) -> Lost:
        """Experts that could not come back to their slots."""
        return self.borrowed.lost

    # running

    def prepare(self) -> None:
        """Load the kernels, so that nothing is compiled or allocated in a prompt.

        A chunk of few tokens has fused kernels of its own: those of windows.
        """
        chunk = self._lowered(self.model.tokens)
        segments = [*chunk.segments, *self._lowered(min(MOST_TOKENS, self.model.tokens)).segments]
        items = [item for segment in segments for item in segment.items]
        for layer in self.model.routed:
            items += chunk.lowering.wave(layer, 0, 1)
        items += PromptLowering(self.model, self.places, self.model.tokens, 1).head(0)
        self.runtime.load(self.device, kernels_of(items))

    def run(
        self, window: Window, places: Sequence[Sequence[int]], number: int
    ) -> NDArray[np.float32]:
        """Compute one chunk; `places` are those of its tokens. Logits of the wanted rows."""
        self.settle()
        self._unsettled = True  # unless the chunk comes to its end
        logits = self._chunk(window, places, number)
        self._unsettled = False
        return logits

    def restore(self) -> None:
        """Have every lent slot hold its expert again, in the order of the stream, or be `lost`."""
        self.settle()
        self._unsettled = True  # unless everything comes back
        self.borrowed.give_back()
        self._unsettled = False

    def settle(self) -> None:
        """After a failure: wait, bounded, until the device is idle; give back what is held."""
        if not self._unsettled:
            return
        self.runtime.take_error()
        for stream in (self.bringing.stager.stream, self.stream):
            self.runtime.record(self._ended, stream)
            self.patience.wait(self._ended, "a prompt that failed")
        self.bringing.stager.abandon()
        self._unsettled = False

    def counters(self) -> dict[str, dict[str, int]]:
        """`prompt`: experts that were brought for prompts; `refill`: into slots they had lent."""
        brought, back = self.bringing.stager, self.borrowed.counts
        count = brought.experts - back["experts"]
        return {
            "prompt": {"experts": count, "bytes": brought.nbytes - back["bytes"]},
            "refill": dict(back),
        }

    def time_chunks(self, *, on: bool) -> None:
        """Keep the times of chunks from now on, or no longer. Raises UsageError, DeviceError."""
        if on and self._timed is None:
            self._timed = Timed(self.runtime, self.device)
        elif not on and self._timed is not None:
            self.settle()
            timed, self._timed = self._timed, None
            timed.close()
        self.bringing.times = self._times

    def chunk_times(self) -> tuple[ChunkTimes, ...]:
        """Those that were kept since it was turned on."""
        return tuple(self._timed.chunks) if self._timed is not None else ()

    @property
    def _times(self) -> Untimed:
        return self._timed or _UNTIMED

    def close(self) -> None:
        """Wait, bounded, until the device is idle, and give back what is held."""
        self._unsettled = True
        with suppress(StrataError):
            self.settle()
            self.time_chunks(on=False)
        self.bringing.stager.abandon()
        self.bringing.stager.close()

    # a chunk

    def _chunk(
        self, window: Window, places: Sequence[Sequence[int]], number: int
    ) -> NDArray[np.float32]:
        tokens = len(window.ids)
        chunk = self._lowered(tokens)
        self.patience.follow(tokens, len(chunk.segments))
        if self._timed is not None:
            self._timed.begin(self.stream)
        every = asks_for_all(tokens, self.model.shape.top_k, self.model.experts)
        if self.borrowed.borrow(many=every):
            self._waves.clear()
        self.places.exchange.fill_frame(number, window, places, self.model.program)
        first, rest = chunk.segments[0], chunk.segments[1:]
        if every:
            if not self._waves:
                self._plan_all()
            first = Segment([*first.items, chunk.lowering.table(None)], first.layer)
        else:
            self._waves.clear()
        for segment in (first, *rest):
            with self._times.span("compute", segment.layer, self.stream):
                self._put(segment.items)
            if segment.layer is not None:
                self._experts(chunk, segment.layer)
        logits = self._heads(window)
        self.bringing.stager.settle()
        self._count()
        if self._timed is not None:
            self._timed.end(tokens, int(window.positions[0]))
        if len(window.logits_rows) and self.borrowed.lent:
            self.borrowed.refill()
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

    def _plan_all(self) -> None:
        turn = 0
        for layer in self.model.routed:
            self._waves[layer], turn = self._plan(layer, range(self.model.experts), turn)

    def _plan(self, layer: int, needed: Sequence[int], turn: int) -> tuple[list[Wave], int]:
        layout, table, lent = self.model.layouts[layer], self._table(layer), self.borrowed
        return plan_waves(layer, layout, needed, lent.slots, lent.ring, turn, table)

    def _experts(self, chunk: _Chunk, layer: int) -> None:
        """Bring and compute a layer's experts: all of them, or those that were picked."""
        waves = self._waves.get(layer)
        if waves is None:
            self.runtime.record(self._routed, self.stream)
            self.patience.wait(self._routed, f"layer {layer}")
            needed = np.flatnonzero(np.diff(self._starts(layer))).tolist()
            waves, _ = self._plan(layer, needed, 0)
            self._put([chunk.lowering.table(layer)])
        begun = self.bringing.begin(layer, [index for wave in waves for index, _ in wave.moves])
        for wave in waves:
            self.bringing.bring(layer, wave, begun=begun)
            with self._times.span("compute", layer, self.stream):
                self._put(chunk.lowering.wave(layer, wave.begin, wave.count))
            self.bringing.computed(wave)

    def _asked(self, expert: Expert) -> bool:
        """Whether the chunk picked an expert of the layer that is computed next; waits for that."""
        self.runtime.record(self._routed, self.stream)
        self.patience.wait(self._routed, f"layer {expert.layer}")
        return bool(self.picked(expert.layer)[expert.index])

    def _heads(self, window: Window) -> NDArray[np.float32]:
        """Logits of the wanted rows, some at a time; the end of the chunk is awaited."""
        wanted = len(window.logits_rows)
        exchange, vocabulary = self.places.exchange, self.model.program.vocabulary
        found = np.empty((wanted, vocabulary), np.float32)
        words = exchange.array("result", np.float32, exchange.rest.size("result") // 4)
        if not wanted:
            source = self.places.regions.at("result")
            with self._times.span("compute", None, self.stream):
                self._put([Copy(exchange.rest.at("result"), source, 4)])
            self._end(words)
        for first in range(0, wanted, HEAD_ROWS):
            count = min(HEAD_ROWS, wanted - first)
            items = PromptLowering(self.model, self.places, len(window.ids), count).head(first)
            with self._times.span("compute", None, self.stream):
                self._put(items)
            self._end(words)
            rows = words[STATUS_BYTES // 4 :][: count * vocabulary].reshape(count, vocabulary)
            found[first : first + count] = rows
        return found

    def _end(self, words: NDArray[np.float32]) -> None:
        self.runtime.record(self._ended, self.stream)
        self.patience.wait(self._ended, "a chunk of a prompt")
        latched = int(words.view(np.uint32)[0])
        if latched != NOTHING_LATCHED:
            raise not_finite(self.model.program, self.files, latched)

    # accounts

    def picked(self, layer: int) -> NDArray[np.int32]:
        """How often each expert of a layer was chosen in the latest chunk."""
        return np.diff(self._starts(layer))

    def _count(self) -> None:
        """Add the entries whose experts were in slots."""
        entries = {layer: self.picked(layer) for layer in self.model.routed}
        for expert in self.borrowed.slots:
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
