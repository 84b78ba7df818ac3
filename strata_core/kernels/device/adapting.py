"""The adaptive cache of the first device: what decode rounds ask for decides what is in slots.

After each decode round swaps that have landed are committed by one copy of the table of cells, and
others begin; counts are brought up to date, and swaps planned, beside the next round. Prompts
neither count nor are followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.abilities import AdaptiveSource, PartlyStableSource
from strata_core.cache.adaptive import Pair, Timetable
from strata_core.cache.beside import Jobs
from strata_core.cache.swaps import Swapper
from strata_core.cache.waiting import await_event
from strata_core.interfaces import BlobLayout, Expert, Source, StableSource
from strata_core.kernels.cpu.serving import stable_experts
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.host_lane import HostLane
from strata_core.memory.held import undo_all
from strata_core.runtime import Runtime


@define(eq=False, kw_only=True)
class DeviceTable:
    """The cells that rounds find experts by, kept the same on the host and on the device.

    `mirror` is page-locked and lies as the cells do on the device from `target`: `nbytes` in all.
    `linked`: cells have the addresses that a device reads over the link. `patience` are the most
    seconds that the host waits for `device`.
    """

    runtime: Runtime
    device: int
    stream: int
    patience: float
    cells: Cells
    mirror: int
    target: int
    nbytes: int
    layouts: Mapping[int, BlobLayout]
    source: Source
    host: HostLane
    linked: bool
    _fresh: bool = field(default=False, init=False)
    _mover: AdaptiveSource | None = field(init=False)
    _stable: bool = field(init=False)
    _spans: dict[int, tuple[int, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # asked once: each of these takes as long as a copy's launch
        self._mover = self.source if isinstance(self.source, AdaptiveSource) else None
        self._stable = isinstance(self.source, StableSource)
        tables = self.cells.layers.items()
        self._spans = {layer: (table.ctypes.data, table.nbytes) for layer, table in tables}

    def publish(self, swaps: Sequence[tuple[Pair, int]]) -> None:
        """From the next round on, each entering expert is in the slot at that address.

        Raises StrataError; then nothing has changed. Layers that no swap is about are left alone.
        """
        if self._fresh:
            # no round came after the last copy, which may still read the mirror
            self._await_copy()
            self._fresh = False
        touched = [e for pair, _ in swaps for e in (pair.leaving, pair.entering)]
        before = [self.cells.saved(expert) for expert in touched]
        try:
            for pair, slot in swaps:
                self._move(pair, slot)
            self._copy({expert.layer for expert in touched})
        except Exception:
            for expert, cell in zip(touched, before, strict=True):
                self.cells.restore(expert, cell)
            raise
        self._fresh = True
        self.cells.version += 1

    def _copy(self, touched: Iterable[int]) -> None:
        """One copy, from the first of these layers' cells to the end of the last one's."""
        spans = [self._spans[layer] for layer in touched]
        start = min(address for address, _ in spans)
        end = max(address + nbytes for address, nbytes in spans)
        assert self.mirror <= start < end <= self.mirror + self.nbytes, "cells lie in the mirror"
        self.runtime.copy(self.target + start - self.mirror, start, end - start, self.stream)

    def _await_copy(self) -> None:
        """Wait, bounded, until what is on the stream is done. Raises EngineError, DeviceError."""
        event = self.runtime.create_event(self.device)
        try:
            self.runtime.record(event, self.stream)
            await_event(self.runtime, event, self.patience, "the copy of the table of cells")
        finally:
            self.runtime.destroy_event(event)

    def _move(self, pair: Pair, slot: int) -> None:
        leaving, entering = pair.leaving, pair.entering
        parts = self.layouts[entering.layer].parts
        self.cells.fill(
            entering, (slot + parts[0].offset, slot + parts[1].offset, slot + parts[2].offset)
        )
        self.cells.empty(leaving)
        if self.linked and self._mover is not None:
            held = self._stable or holds(self.source, leaving)
            self.cells.link(leaving, alias_of(self.source, leaving) if held else None)
            self.cells.link(entering, None)

    def refresh(self, experts: Iterable[Expert]) -> None:
        """The source's addresses of these experts have changed."""
        if self._mover is not None:
            self.host.serving.moved(experts)

    def round_over(self) -> None:
        """A round has ended, and with it what was on its stream before it."""
        self._fresh = False


def holds(source: Source, expert: Expert) -> bool:
    """Whether the expert's address holds for more than one round; asks about no other one."""
    if isinstance(source, StableSource):
        return True
    if isinstance(source, PartlyStableSource):
        return bool(source.stable_addresses(expert.layer)[expert.index, 0])
    return False


def alias_of(source: Source, expert: Expert) -> tuple[int, int, int] | None:
    """Where a device finds an expert's gate, up and down over the link; None where it cannot.

    The expert is one whose address holds.
    """
    view = source.view(expert)
    source.release(expert)
    if view.alias is None:
        return None
    gate, up, down = (view.alias + part - view.parts[0] for part in view.parts)
    return gate, up, down


def reachable(
    source: Source, layouts: Mapping[int, BlobLayout], excluded: AbstractSet[Expert]
) -> dict[Expert, tuple[int, int, int]]:
    """The device's addresses of gate, up and down of every expert that it can read in place."""
    found = {}
    for layer in layouts:
        for index in stable_experts(source, layer):
            expert = Expert(layer, index)
            parts = None if expert in excluded else alias_of(source, expert)
            if parts is not None:
                found[expert] = parts
    return found


@define(eq=False)
class Adaptation:
    """Brings policy and swaps together; called on the thread of the rounds, between them.

    `jobs` are what both of them have done beside rounds. What goes wrong there ends all swaps, and
    is reported after the next round; no round fails for it.
    """

    timetable: Timetable
    swapper: Swapper
    table: DeviceTable
    jobs: Jobs

    def before(self) -> None:
        """A round begins, so that the interpreter is idle in a moment."""
        if not self.swapper.stopped:
            self.timetable.begin()

    def after(self, asked: NDArray[np.int64]) -> None:
        """A decode round is over that asked for the experts of these numbers; the array is kept."""
        self.table.round_over()
        if self.swapper.stopped:
            return
        self.timetable.round(asked)
        try:
            pairs = self.timetable.due()
        except Exception as error:  # noqa: BLE001 - whatever a job raised
            self.swapper.stop(error)
            return
        self.timetable.put_back(self.swapper.tick(pairs))

    def rest(self) -> bool:
        """Wait, bounded, until nothing is on its way; whether that is so.

        To be called before slots are used for anything else.
        """
        return self.swapper.settle()

    def reading(self) -> Expert | None:
        """An expert that `rest` would still wait for the source to read."""
        return self.swapper.reading()

    def gone(self, expert: Expert) -> None:
        """An expert is in no slot any more, and no swap took it out. Nothing may be on its way."""
        self.timetable.gone(expert)

    def counters(self) -> dict[str, dict[str, int]]:
        """Experts and bytes that entered the cache, and that left it with a copy."""
        counts = self.swapper.counts
        return {
            "entered": {
                "experts": counts.entered,
                "bytes": counts.entered_bytes,
                "undone": counts.undone,
            },
            "left": {"experts": counts.left, "bytes": counts.left_bytes},
        }

    def close(self) -> None:
        """Undo what is on its way; no round may be running. Again, it does nothing.

        Waits, bounded, for a job that is under way. Raises StrataError when all is done.
        """
        end_jobs = partial(self.jobs.close, self.swapper.patience)
        undo_all(self.swapper.runtime, [end_jobs, self.swapper.close])
