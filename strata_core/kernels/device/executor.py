"""A program bound to a device: windows in pieces, prompts, rounds by mode, sequences, failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from strata_core.errors import DeviceError, EngineError
from strata_core.interfaces import Expert, ExpertFiles, Window
from strata_core.kernels.cpu.hand_over import NO_FAILURE
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.not_finite import not_finite
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.adapting import Adaptation
from strata_core.kernels.device.correcting import Correction
from strata_core.kernels.device.dispatch import Dispatcher, random_tokens
from strata_core.kernels.device.exchange import next_number
from strata_core.kernels.device.kv import KvRoom, KvRooms
from strata_core.kernels.device.latches import Latches
from strata_core.kernels.device.layout import LANES, STATUS_BYTES
from strata_core.kernels.device.picks import Picks
from strata_core.kernels.device.prompt import PromptPath
from strata_core.kernels.device.rounds import Maker, Round
from strata_core.kernels.device.segments import Mode
from strata_core.kernels.device.served import Served
from strata_core.kernels.device.stopped import not_at_rest, stopped, wait_until_idle
from strata_core.kernels.exact import SPLIT
from strata_core.kernels.rope import Turns
from strata_core.memory.held import undo_all

PATIENCE = 10.0
"""Seconds that a wait for a device takes at most."""


class DeviceExecutor:
    """Runs windows of any length up to the limits; used by one thread, and any asks for accounts.

    Longer windows than the kernels take are run in pieces, with the same bits. After an error the
    sequences of the window hold no valid state, and the next run first waits, bounded, until the
    device has nothing left to do.
    """

    def __init__(
        self,
        maker: Maker,
        prompts: PromptPath,
        rooms: KvRooms,
        experts: ExpertFiles,
        library: Library,
        pool: Pool,
        on_close: Callable[[], None],
        dispatcher: Dispatcher,
        adaptation: Adaptation | None = None,
        correction: Correction | None = None,
    ) -> None:
        self._maker, self._rooms, self._files = maker, rooms, experts
        self._prompts = prompts
        self._model, self._exchange = maker.model, maker.places.exchange
        self._run_step, self._pool = library.runner(), pool
        self._on_close, self._adaptation = on_close, adaptation
        self._dispatcher, self._correction = dispatcher, correction
        self._rounds: dict[tuple[int, int, int, bool], Round] = {}
        self._slots: dict[int, KvRoom] = {}
        self._number = 0
        self._unsettled = self._prompted = False
        self._closed = False
        self._most_splits = self._model.splits(0)
        shape = (self._model.limits.logits, self._model.program.vocabulary)
        self._logits = np.zeros(shape, np.float32)
        words = self._exchange.array("result", np.float32, self._exchange.rest.size("result") // 4)
        rows = words[STATUS_BYTES // 4 :].reshape(
            self._model.tokens, self._model.program.vocabulary
        )
        self._rows: NDArray[np.float32] = rows
        self._latches = Latches.of(
            self._exchange, [h.number for h in maker.helpers], maker.host.status, maker.hand.failure
        )
        self._turns = Turns(self._model.program.rope)
        routed = self._model.routed
        picked = self._exchange.array("picks", np.int32, len(routed), self._exchange.shape.entries)
        self._picks = Picks(picked, self._model.experts)
        self._served = Served(
            self._exchange.array("counts", np.uint64, len(routed), LANES),
            [self._model.layouts[layer].nbytes for layer in routed],
        )

    # sequences

    def open_sequence(self) -> int:
        """Room for the keys and values of `limits.context` positions. Raises Refused."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[slot] = self._rooms.take()
        return slot

    def close_sequence(self, slot: int) -> None:
        """Free a slot."""
        self._rooms.give(self._slots.pop(slot))

    def save(self, slot: int, length: int) -> object:
        """Keys and values of earlier positions never change, so the length is all there is."""
        del slot
        return length

    def restore(self, slot: int, snapshot: object) -> None:
        """Nothing to undo: later positions are overwritten before they are read again."""

    # running

    def run(self, window: Window) -> NDArray[np.float32]:
        """Compute one window: a prompt's as one chunk, others in pieces of a few tokens."""
        tokens, wanted = len(window.ids), len(window.logits_rows)
        limits = self._model.limits
        if tokens > limits.tokens or wanted > limits.logits:
            raise EngineError(
                f"a window of {tokens} tokens and {wanted} logits rows is too big",
                f"the program is bound for {limits.tokens} and {limits.logits}",
                "this is an error in the engine; please report it",
            )
        if window.kernel_class == "prompt" and len(np.unique(window.slots)) == 1:
            return self._prompt(window)
        if self._prompted:
            self._after_prompt()
        # a prompt wants the logits of its last token at most
        decoding = wanted == tokens and window.kernel_class == "window"
        as_it_is = wanted <= 1 or window.logits_rows.tolist() == list(range(tokens))
        if 0 < tokens <= self._model.tokens and as_it_is:
            return self._piece(window, decoding=decoding)
        logits = self._logits[:wanted]
        for start in range(0, tokens, self._model.tokens):
            stop = min(start + self._model.tokens, tokens)
            here = (window.logits_rows >= start) & (window.logits_rows < stop)
            rows, back = np.unique(window.logits_rows[here], return_inverse=True)
            piece = Window(
                ids=window.ids[start:stop],
                positions=window.positions[start:stop],
                slots=window.slots[start:stop],
                logits_rows=rows - start,
                kernel_class=window.kernel_class,
            )
            logits[here] = self._piece(piece, decoding=decoding)[back]
        return logits

    def _prompt(self, window: Window) -> NDArray[np.float32]:
        self._settle()
        self._prompted = True
        if self._adaptation is not None and not self._adaptation.rest():
            raise not_at_rest(self._adaptation.reading(), self._maker.hand.bound)
        self._number = next_number(self._number)
        places = [self._slots[int(s)].place for s in window.slots]
        logits = self._prompts.run(window, places, self._number)
        if self._model.routed:
            picked = [self._prompts.picked(layer) for layer in self._model.routed]
            self._picks.add(np.concatenate(picked))
        return logits

    def _after_prompt(self) -> None:
        """Have decoding find what it had, before its first window; after an error, once more."""
        self._prompts.restore()
        if lost := self._prompts.lost.experts:
            self._go_without(lost)
        self._prompted = False

    def _go_without(self, lost: list[Expert]) -> None:
        """Experts that could not come back to their slots are misses like any other from now on.

        A round may have no lane for them where all of a layer were in slots, so all are made anew.
        """
        self._settle()
        self._maker.empty(lost)
        self._drop_rounds()
        for expert in lost:
            if self._adaptation is not None:
                self._adaptation.gone(expert)
        lost.clear()

    def _drop_rounds(self) -> None:
        graphs = [graph for ready in self._rounds.values() for graph in ready.graphs]
        self._rounds.clear()
        runtime = self._maker.runtime
        undo_all(runtime, [partial(runtime.destroy_graph, graph) for graph in graphs])

    def prepare(self, mode: Mode, *, doorbell: bool) -> Round:
        """The round of a mode, made at its first use."""
        key = mode.tokens, mode.wanted, mode.splits, doorbell
        if key not in self._rounds:
            bound = self._dispatcher.bound(mode.tokens) if doorbell else None
            self._rounds[key] = self._maker.make(mode, bound)
        return self._rounds[key]

    def prepare_first(self) -> None:
        """Make the rounds of a token and of the largest window, so that kernels are compiled.

        Then it is decided how rounds run, by timing some where that is open.
        """
        first = self.prepare(Mode(1, 1, 1), doorbell=False)
        if first.dispatch == "device":
            self._dispatcher.stand_aside()
        elif self._dispatcher.undecided:
            self._time_rounds()
        for mode in (Mode(1, 1, 1), Mode(self._model.tokens, 0, 1)):
            self.prepare(mode, doorbell=self._dispatcher.doorbell)
        self._prompts.prepare()

    def _time_rounds(self) -> None:
        """Have the dispatcher time rounds of one token; nothing of them is counted."""
        try:
            self.prepare(Mode(1, 1, 1), doorbell=True)
        except DeviceError as error:
            self._maker.runtime.take_error()
            return self._dispatcher.go_without(error)
        slot, longest = self.open_sequence(), min(SPLIT, self._model.limits.context)
        windows = random_tokens(slot, self._model.program.vocabulary, longest)

        def attempt(doorbell: bool) -> bool:
            return self._attempt(next(windows), self.prepare(Mode(1, 1, 1), doorbell=doorbell))

        try:
            self._dispatcher.choose(attempt)
            self._uncount()
            self._maker.runtime.synchronize(self._maker.stream)
        finally:
            self.close_sequence(slot)

    def ready(self, window: Window, *, doorbell: bool) -> Round:
        """The round that a window of at most the kernels' tokens runs in, made at its first use.

        Rows of logits are none, one or all; splits of attention are a power of two.
        """
        tokens, wanted = len(window.ids), len(window.logits_rows)
        behind = max(window.positions.tolist(), default=0) // SPLIT
        splits = min(1 << behind.bit_length(), self._most_splits)
        rows = wanted if wanted <= 1 else tokens
        # by its sizes: to make a mode takes longer than to find its round
        found = self._rounds.get((tokens, rows, splits, doorbell))
        return found or self.prepare(Mode(tokens, rows, splits), doorbell=doorbell)

    def _piece(self, window: Window, *, decoding: bool) -> NDArray[np.float32]:
        """Run a window of few tokens; rows of the device's memory, for the next round to write."""
        if self._unsettled:
            self._settle()
        wanted = len(window.logits_rows)
        ready = self.ready(window, doorbell=self._dispatcher.doorbell)
        mode = ready.mode
        if mode.wanted != wanted:
            padded = np.zeros(mode.wanted, np.int32)
            padded[:wanted] = window.logits_rows
            window = evolve(window, logits_rows=padded)
        if not self._attempt(window, ready):
            self._once_more(window, mode)
        self._served.keep()
        latched = self._latches.lowest()
        if latched != NOTHING_LATCHED:
            raise not_finite(self._model.program, self._files, latched)
        self._count(mode.tokens, decoding=decoding)
        if self._correction is not None and mode.tokens == 1:
            self._correct(self._correction)
        return self._rows[:wanted]

    def _attempt(self, window: Window, ready: Round) -> bool:
        """Run a round; False where the device waited in vain, and what it computed is rubbish."""
        self._number = number = next_number(self._number)
        if ready.mode.tokens == 1:
            place, position = self._slots[window.slots.item()].place, window.positions.item()
            turns = self._turns.at(position)
            self._exchange.fill_token(number, window.ids.item(), position, place, turns)
        else:
            places = [self._slots[slot].place for slot in window.slots.tolist()]
            self._exchange.fill_frame(number, window, places, self._model.program)
        latches = self._latches
        latches.clear()
        self._maker.host.begin(ready.mode.tokens)
        # whatever ends the round early, the device may still be busy with it
        self._unsettled = True
        if self._adaptation is not None:
            self._adaptation.before()
        self._run_round(ready)
        if latches.failure[0] != NO_FAILURE:
            raise stopped(self._maker, ready.dispatch)
        self._unsettled = False
        return latches.late[0] == NOTHING_LATCHED

    def _once_more(self, window: Window, mode: Mode) -> None:
        """Run a round that waited in vain again, stepped."""
        late = f"layer {self._model.routed[self._latches.late[0]]}"
        self._dispatcher.timed_out(late, self._dispatcher.bound(mode.tokens), self._number)
        # keys and values are written again before they are read
        self._uncount()
        self._attempt(window, self.prepare(mode, doorbell=False))

    def _correct(self, correction: Correction) -> None:
        """Split misses otherwise from the next round on, where the last ones ask for it."""
        found = correction.after(self._maker.split)
        if found is None:
            return
        # the copy of the last correction was done long ago: rounds came after it
        mirror = self._exchange.array("share", np.int32, len(found.table))
        mirror[:] = found.table
        target, source = self._maker.places.regions.at("share"), mirror.ctypes.data
        self._maker.runtime.copy(target, source, mirror.nbytes, self._maker.stream)
        self._maker.split = found

    def _uncount(self) -> None:
        """What lanes served becomes again what it was after the last round that counts."""
        self._served.put_back()
        told = self._served.told
        target, source = self._maker.places.regions.at("counts"), told.ctypes.data
        self._maker.runtime.copy(target, source, told.nbytes, self._maker.stream)

    def _count(self, tokens: int, *, decoding: bool) -> None:
        """A round is over: count what its routers chose, and let the cache follow a decode round.

        Prompts are counted, but the cache does not follow them: the experts of decoding stay.
        """
        picked = self._picks.note(tokens * self._model.shape.top_k)
        if decoding and self._adaptation is not None:
            self._adaptation.after(self._picks.numbers(picked))

    def _run_round(self, ready: Round) -> None:
        if ready.schedule is not None:
            self._maker.host.serving.run(self._pool, ready.schedule)
        for step in ready.steps:
            self._run_step(step.function, step.args, 0, 1)

    # failures

    def _settle(self) -> None:
        """After a failure: wait until the device is idle, at most as long as for a round."""
        if not self._unsettled:
            return
        wait_until_idle(self._maker)
        self._unsettled = False

    # accounts

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Experts and bytes by lane so far; tokens that share an expert count each.

        Any thread may ask at any time, also after `close`: nothing is asked of the device. They are
        those of the rounds that came to their end; what one that failed had served until then comes
        with the next one's.
        """
        totals = self._served.by_lane()
        totals["hit"]["experts"] += self._prompts.counts["entries"]
        totals["hit"]["bytes"] += self._prompts.counts["bytes"]
        totals.update(self._prompts.counters())
        if self._adaptation is not None:
            totals.update(self._adaptation.counters())
        return totals

    def picks(self) -> Mapping[int, NDArray[np.int64]]:
        """How often each expert was chosen so far, by layer; any thread may ask."""
        rows = self._picks.totals().reshape(len(self._model.routed), -1)
        return dict(zip(self._model.routed, rows, strict=True))

    def asked(self) -> Mapping[str, int]:
        """Experts that the CPU's lane had to ask the source for."""
        return self._maker.host.serving.counters()

    def lanes(self) -> Mapping[str, Any]:
        """How misses are split, the rates behind it, and how rounds of several lanes run."""
        split = self._maker.split.as_json(self._model.shape.top_k)
        return {**split, "dispatch": self._dispatcher.as_json()}

    def time_prompts(self, *, on: bool) -> None:
        """Keep the times of prompts' chunks from now on, or no longer."""
        self._prompts.time_chunks(on=on)

    def prompt_times(self) -> Sequence[Mapping[str, Any]]:
        """Copies, computing and waits of each chunk by layer, by the device's clock."""
        return [chunk.as_json() for chunk in self._prompts.chunk_times()]

    def close(self) -> None:
        """Free graphs, buffers and slots; the pool and the device belong to the backend."""
        if self._closed:
            return
        self._closed = True
        self._slots.clear()
        runtime = self._maker.runtime
        steps: list[Callable[[], None]] = [self._settle, self._prompts.close]
        steps += [self._maker.host.close]
        steps += [self._adaptation.close] if self._adaptation else []
        steps += [self._drop_rounds]
        steps += [helper.forget for helper in self._maker.helpers]
        undo_all(runtime, [*steps, self._on_close])
