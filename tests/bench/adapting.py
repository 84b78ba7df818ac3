"""What an adaptive cache costs the host between two decode rounds.

    python tests/bench/adapting.py [--layers 48] [--experts 128] [--share 0.5] [--skew 0.6]

The parts of a device's cache that follows the text are driven as an executor drives them, over a
runtime whose verbs do nothing and a source that keeps what is in no slot in places, so that all of
the time is the host's own: between two rounds, and of the round's begin. A round is a pause in
which memory is read, as much as a round would leave of the processor's caches. Microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from strata_core.abilities import Move
from strata_core.cache.adaptive import EXCHANGE_MARGIN, Demand, Timetable
from strata_core.cache.beside import Beside
from strata_core.cache.slots import SlotClass, SlotPool, slot_bytes
from strata_core.cache.swaps import Swapper
from strata_core.interfaces import BlobLayout, BlobPart, Expert, View
from strata_core.kernels.device.adapting import Adaptation, DeviceTable
from strata_core.kernels.device.cells import Cells
from strata_core.kernels.device.layout import CELL
from strata_core.plan.moving import Pace, spares

HIDDEN, INNER, TOP = 2048, 768, 8


def layout(type_of_down: str, bits: int) -> BlobLayout:
    """A blob of the 30B-A3B shape; `bits` a weight of the down matrix."""
    parts, offset = [], 0
    sizes = {
        "gate": (INNER, HIDDEN, 144),
        "up": (INNER, HIDDEN, 144),
        "down": (HIDDEN, INNER, bits),
    }
    for name, (rows, columns, block) in sizes.items():
        nbytes = rows * columns // 256 * block
        kind = type_of_down if name == "down" else "Q4_K"
        parts.append(BlobPart(name, kind, rows, columns, offset, nbytes))
        offset += nbytes
    return BlobLayout(tuple(parts), offset)


class Nothing:
    """A runtime whose copies have landed as soon as they are asked for."""

    label = "NONE"

    def __init__(self) -> None:
        self._number = 0

    def make(self, device: int) -> int:
        """A stream or an event."""
        self._number += 1
        return self._number

    create_stream = create_event = make

    def ignore(self, *given: int) -> None:
        """Do nothing."""

    record = wait = copy = synchronize = destroy_stream = destroy_event = ignore

    def finished(self, event: int) -> bool:
        """It has happened."""
        return True

    def take_error(self) -> str | None:
        """There is none."""
        return None


class Places:
    """A source that keeps what is in no slot, as the resident one does; addresses of no memory."""

    def __init__(self, layouts: dict[int, BlobLayout], outside: list[Expert], empty: int) -> None:
        each = max(x.nbytes for x in layouts.values())
        starts = [(1 << 40) + each * n for n in range(len(outside) + empty)]
        self.layouts = layouts
        self.places = dict(zip(outside, starts, strict=False))
        self.free = starts[len(outside) :]

    def _parts(self, expert: Expert, start: int) -> tuple[int, int, int]:
        gate, up, down = (start + part.offset for part in self.layouts[expert.layer].parts)
        return gate, up, down

    def addresses(self, layer: int) -> NDArray[np.uint64]:
        """Nobody asks."""
        raise NotImplementedError

    def view(self, expert: Expert) -> View:
        """Where it is."""
        start = self.places.get(expert)
        if start is None:
            return View((0, 0, 0), in_ram=False)
        return View(self._parts(expert, start), in_ram=True, dma=True, alias=start)

    def begin_layer(self, layer: int, experts: list[int]) -> None:
        """Nothing to do."""

    def release(self, expert: Expert) -> None:
        """Nothing to do."""

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Nobody asks."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do."""

    def begin_demote(self, expert: Expert) -> Move | None:
        """An empty place."""
        if expert in self.places or not self.free:
            return None
        return Move(expert, "demote", self._parts(expert, self.free.pop()), dma=True)

    def begin_promote(self, expert: Expert) -> Move | None:
        """Its place will be empty."""
        return Move(expert, "promote", None) if expert in self.places else None

    def commit(self, move: Move) -> None:
        """As it was begun."""
        if move.parts is None:
            self.free.append(self.places.pop(move.expert))
        else:
            self.places[move.expert] = move.parts[0]

    def abort(self, move: Move) -> None:
        """As it was."""
        if move.parts is not None:
            self.free.append(move.parts[0])


class Addresses:
    """What the CPU finds experts by."""

    def __init__(self, source: Places, experts: int) -> None:
        self._source = source
        self._tables = {layer: np.zeros((experts, 3), np.uint64) for layer in source.layouts}

    def moved(self, experts: Iterable[Expert]) -> None:
        """Ask for the addresses that a move has changed."""
        for expert in experts:
            self._tables[expert.layer][expert.index] = self._source.view(expert).parts


def asked(layers: int, experts: int, skew: float, rounds: int) -> Iterator[NDArray[np.int64]]:
    """Numbers of the experts that each round asks for: routers with log-normal norms."""
    rng = np.random.default_rng(0)
    width = 64
    norms = np.exp(rng.normal(0, skew, (layers, experts, 1)))
    routers = rng.standard_normal((layers, experts, width)) * norms
    first = np.arange(layers)[:, None] * experts
    for _ in range(rounds):
        scores = routers @ rng.standard_normal(width)
        yield (np.argpartition(-scores, TOP, 1)[:, :TOP] + first).ravel()


def make(given: argparse.Namespace) -> Adaptation:
    """A cache in which the first experts of every layer are, and what follows the text."""
    kinds = [layout("Q4_K", 144), layout("Q6_K", 210)]
    layouts = {n: kinds[n % 2] for n in range(given.layers)}
    everyone = [Expert(n, i) for i in range(given.experts) for n in layouts]
    inside = everyone[: round(len(everyone) * given.share)]
    outside = everyone[len(inside) :]
    pace = Pace(given.every, given.swaps)
    classes, places, spare, start = [], {}, {}, 1 << 20
    for kind in kinds:
        here = [e for e in inside if layouts[e.layer] == kind]
        empty = spares(len(here), len(everyone) // 2, pace.at_once)
        made = SlotClass(slot_bytes(kind), start, len(here) + empty)
        classes.append(made)
        slots = [made.slot(n) for n in range(made.count)]
        places |= dict(zip(here, slots, strict=False))
        spare[made.nbytes] = slots[len(here) :]
        start += made.nbytes * made.count
    pool = SlotPool(0, tuple(classes), places, spare)
    runtime, source = Nothing(), Places(layouts, outside, 2 * pace.at_once)
    demand = Demand.of(layouts, given.experts, everyone)
    demand.put_inside(inside)
    mirror = np.zeros((given.layers, given.experts), CELL)
    cells = Cells(dict(enumerate(mirror)), moving=True)
    table = DeviceTable(
        runtime=runtime,
        device=0,
        stream=0,
        patience=10.0,
        cells=cells,
        mirror=mirror.ctypes.data,
        target=1 << 50,
        nbytes=mirror.nbytes,
        layouts=layouts,
        source=source,
        host=SimpleNamespace(serving=Addresses(source, given.experts)),
        linked=True,
    )
    jobs = Beside("beside")
    timetable = Timetable(pace, demand, jobs, EXCHANGE_MARGIN)
    swapper = Swapper(
        runtime=runtime,
        pool=pool,
        layouts=layouts,
        source=source,
        table=table,
        policy=timetable,
        jobs=jobs,
        degrade=print,
        patience=10.0,
        buffers=[],
    )
    return Adaptation(timetable, swapper, table, jobs)


def main() -> None:
    """Print the times of rounds, and how many experts changed places meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument("--share", type=float, default=0.5, help="of them in slots")
    parser.add_argument("--skew", type=float, default=0.6)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--swaps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=400, help="that are timed")
    parser.add_argument("--warm", type=int, default=100, help="rounds before them")
    parser.add_argument("--mib", type=int, default=48, help="that a round reads")
    given = parser.parse_args()
    adaptation = make(given)
    weights = np.ones(given.mib << 17)
    taken, begun, entered = [], [], []
    for numbers in asked(given.layers, given.experts, given.skew, given.warm + given.rounds):
        start = time.perf_counter_ns()
        adaptation.before()
        begun.append(time.perf_counter_ns() - start)
        # both give the interpreter away, as a round does
        weights.max()
        time.sleep(0.002)
        before = adaptation.swapper.counts.entered
        start = time.perf_counter_ns()
        adaptation.after(numbers)
        taken.append(time.perf_counter_ns() - start)
        entered.append(adaptation.swapper.counts.entered - before)
    adaptation.close()
    some = np.array(entered[given.warm :])
    us = (np.array(taken) + np.array(begun))[given.warm :] / 1e3
    quiet = us[some == 0]
    print(
        f"{given.layers} x {given.experts}, share {given.share:g}: {some.mean():.1f} swaps a round"
    )
    for name, row in (("all", us), ("no swap", quiet), ("swaps", us[some > 0])):
        if len(row):
            p90 = np.percentile(row, 90)
            print(
                f"  {name:<8}{len(row):>5} rounds: median {np.median(row):6.0f}, "
                f"mean {row.mean():6.0f}, p90 {p90:6.0f}, most {row.max():6.0f}"
            )


if __name__ == "__main__":
    main()
