"""Experts for compiled rounds: a table of addresses, and a mailbox for those that have none.

A source publishes the addresses that hold (`StableSource` all of them, `PartlyStableSource` some);
compiled code reads them without asking anybody. For the others a round writes a request, and while
the pool computes the experts that are there, the engine's thread, which alone may call a source,
asks for the rest. A round that may have to ask is led by a thread of its own for that reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from queue import SimpleQueue

import numpy as np

from strata_core.abilities import PagedSource, PartlyStableSource
from strata_core.interfaces import Expert, Source, StableSource
from strata_core.kernels.cpu.mailbox import (
    COUNT,
    FAILED,
    INDICES,
    LANDED,
    LAYER,
    MAILBOX_WORDS,
    write_function,
)
from strata_core.kernels.cpu.pool import Pool, Schedule, aligned_words
from strata_core.kernels.cpu.workspace import ExpertLayer

_DONE = b"d"
"""What the leader writes into the pipe when its round is over; anything else is a request."""


def stable_experts(source: Source, layer: int) -> list[int]:
    """Experts of a layer whose addresses hold for more than one round."""
    if isinstance(source, StableSource):
        places = source.addresses(layer)
    elif isinstance(source, PartlyStableSource):
        places = source.stable_addresses(layer)
    else:
        return []
    found: list[int] = np.flatnonzero(places[:, 0]).tolist()
    return found


class Serving:
    """Keeps the tables of `layers` and serves the mailbox. One thread calls it, the engine's.

    `asks` is False where every expert has an address that holds: then no round needs the mailbox.
    `hints` says how rounds tell the system which pages they read next, where that is of use.
    After a failed request the round is computed to its end, as rubbish, and `run` raises what the
    source raised; the next round begins anew. Nothing is held between rounds.
    """

    def __init__(self, source: Source, layers: Mapping[int, ExpertLayer]) -> None:
        self._source, self._layers = source, layers
        self.asks = not isinstance(source, StableSource)
        self.hints = source.page_hints if isinstance(source, PagedSource) else None
        # asked once: a look at a protocol takes as long as all else that is done for a round
        self._partly = source if isinstance(source, PartlyStableSource) else None
        self.box = aligned_words(MAILBOX_WORDS)
        self.send = write_function()
        self._counts = {"experts": 0, "bytes": 0, "requests": 0, "answer_us": 0}
        self._version: int | None = None
        self._complete = not self.asks
        self._held: list[Expert] = []
        self._order = threading.Lock()
        self._leader: _Leader | None = None
        self._pipe: tuple[int, int] | None = None
        if isinstance(source, StableSource):
            for number, layer in layers.items():
                layer.table[:] = source.addresses(number)

    @property
    def pipe(self) -> int:
        """Where requests are announced."""
        return self._ends()[1]

    def _ends(self) -> tuple[int, int]:
        """The pipe's ends, made when they are first asked for."""
        if self._pipe is None:
            self._pipe = os.pipe()
        return self._pipe

    # rounds

    def run(self, pool: Pool, schedule: Schedule) -> None:
        """Run a schedule with a pool, and serve what it asks for. Raises what the source raises."""
        self.refresh()
        if self._complete:
            pool.run(schedule)
            return
        reading, writing = self._ends()
        self.box[FAILED] = 0
        if self._leader is None:
            self._leader = _Leader(writing)
        self._leader.start(pool, schedule)
        error = self._serve_until_done(reading)
        for end in (self._let_go, self._leader.finish):
            try:
                end()
            except BaseException as caught:  # noqa: BLE001 - the first is raised when all is done
                error = error or caught
        if error is not None:
            raise error

    def _serve_until_done(self, pipe: int) -> BaseException | None:
        """Serve requests until the leader is done; the first error, after which none is served.

        An interrupt counts as one: the round must come to its end before anything else happens.
        """
        error: BaseException | None = None
        while True:
            try:
                if os.read(pipe, 1) == _DONE:
                    return error
                if error is None:
                    self._serve()
            except BaseException as caught:  # noqa: BLE001 - raised when the round is over
                error = error or caught
                self.box[FAILED] = 1

    def refresh(self) -> None:
        """Read the published addresses again, where they have changed since."""
        source = self._partly
        if source is None:
            return
        if source.stable_version == self._version:
            return
        self._version = source.stable_version
        for number, layer in self._layers.items():
            layer.table[:] = source.stable_addresses(number)
        self._complete = all(layer.table[:, 0].all() for layer in self._layers.values())

    def moved(self, experts: Iterable[Expert]) -> None:
        """Ask for addresses that a move has changed, where the source tells of no version."""
        if self.asks:
            return  # `refresh` does, or each round asks anew
        for expert in experts:
            view = self._source.view(expert)
            self._source.release(expert)
            self._layers[expert.layer].table[expert.index] = view.parts

    def _serve(self) -> None:
        """Acquire the experts of the request; each is in the table before it counts as landed."""
        began = time.perf_counter_ns()
        self._let_go()
        number = int(self.box[LAYER])
        wanted: list[int] = self.box[INDICES : INDICES + int(self.box[COUNT])].tolist()
        table = self._layers[number].table
        self._source.begin_layer(number, wanted)
        for landed, index in enumerate(wanted, 1):
            expert = Expert(number, index)
            parts = self._source.view(expert).parts
            self._held.append(expert)
            # a lock's release and taking keep the order of the two writes on every processor
            with self._order:
                table[index] = parts
            with self._order:
                self.box[LANDED] = landed
        layout = self._layers[number].layout
        self._counts["requests"] += 1
        self._counts["experts"] += len(wanted)
        self._counts["bytes"] += len(wanted) * layout.nbytes
        self._counts["answer_us"] += (time.perf_counter_ns() - began) // 1000

    def _let_go(self) -> None:
        """Give back what the last request acquired; nothing computes with it any more.

        All of it, whatever the source raises; the first error is raised at the end.
        """
        held, self._held = self._held, []
        first: BaseException | None = None
        for expert in held:
            self._layers[expert.layer].table[expert.index] = 0
            try:
                self._source.release(expert)
            except BaseException as error:  # noqa: BLE001 - raised when all were given back
                first = first or error
        if first is not None:
            raise first

    def counters(self) -> dict[str, int]:
        """Experts that the source was asked for, their bytes, the requests and their time."""
        return dict(self._counts) if self.asks else {}

    def close(self) -> None:
        """End the thread that leads. Calling it again does nothing."""
        leader, self._leader = self._leader, None
        pipe, self._pipe = self._pipe, None
        if leader is not None:
            leader.close()
        for descriptor in pipe or ():
            os.close(descriptor)


class _Leader:
    """A thread that leads a pool's rounds while another one serves them."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._work: SimpleQueue[tuple[Pool, Schedule] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._lead, name="strata-lead", daemon=True)
        self._thread.start()

    def start(self, pool: Pool, schedule: Schedule) -> None:
        """Begin a round; its end is announced in the pipe."""
        self._error = None
        self._work.put((pool, schedule))

    def finish(self) -> None:
        """After the end was announced. Raises what the round raised."""
        if self._error is not None:
            raise self._error

    def _lead(self) -> None:
        while (work := self._work.get()) is not None:
            pool, schedule = work
            try:
                pool.run(schedule)
            except BaseException as error:  # noqa: BLE001 - raised by `finish`
                self._error = error
            os.write(self._pipe, _DONE)

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        with suppress(RuntimeError):
            self._thread.join()
