"""Sources, a table and a swapper on the simulated accelerator; each checks what it sees."""

from concurrent.futures import wait

import numpy as np

from strata_core.abilities import Move
from strata_core.cache.adaptive import Demand
from strata_core.cache.beside import Beside
from strata_core.cache.slots import make_slots
from strata_core.cache.staging import staging_bytes
from strata_core.cache.swaps import Swapper
from strata_core.errors import StrataError
from strata_core.interfaces import BlobLayout, BlobPart, Expert, View
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held
from strata_core.memory.ledger import Ledger
from strata_core.testing.sim import SimHardware, SimRuntime

MIB = 1 << 20
COUNT = 5


def layout(rows):
    each = rows * 128
    names = ("gate", "up", "down")
    parts = tuple(BlobPart(n, "F32", rows, 32, i * each, each) for i, n in enumerate(names))
    return BlobLayout(parts, 3 * each)


LAYOUTS = {0: layout(7), 2: layout(9), 5: layout(7)}
ALL = [Expert(layer, i) for i in range(COUNT) for layer in LAYOUTS]
RNG = np.random.default_rng(3)
BLOBS = {e: RNG.integers(0, 256, LAYOUTS[e.layer].nbytes, np.uint8) for e in ALL}


class Files:
    """Experts that are read when they are asked for, each with `pad` bytes before it."""

    def __init__(self, pad=0):
        self.pad, self.broken, self.slow = pad, set(), None

    def view(self, expert):
        raise AssertionError("to ask this source for a view is to wait")

    def read_into(self, expert, buffer):
        if self.slow is not None:
            self.slow.wait(120)
        if expert in self.broken:
            raise StrataError(f"cannot read {expert}", "the disk is gone", "mend it")
        assert len(buffer) >= -(-len(BLOBS[expert]) // 4096) * 4096 + 4096
        buffer[self.pad : self.pad + len(BLOBS[expert])] = BLOBS[expert].data
        return self.pad

    def begin_layer(self, layer, experts):
        pass

    def release(self, expert):
        pass

    def close(self):
        pass


class Resident(Files):
    """Every expert outside the slots has a place in host memory; `spare` places are empty.

    Of `pinned` places a copy engine may use; the others are for the CPU alone.
    """

    def __init__(self, held, inside, pinned=True, spare=2):
        super().__init__()
        self.pinned, self.inside = pinned, set(inside)
        self.free, self.places, self.open = [], {}, []
        self.memory = []
        size = max(x.nbytes for x in LAYOUTS.values())
        wanted = [e for e in ALL if e not in self.inside]
        for number in range(len(wanted) + spare):
            if pinned:
                address = held.pinned(size, "a place")
            else:
                self.memory.append(np.zeros(size, np.uint8))
                address = self.memory[-1].ctypes.data
            if number < len(wanted):
                self.places[wanted[number]] = address
                bytes_at(address, len(BLOBS[wanted[number]]))[:] = BLOBS[wanted[number]]
            else:
                self.free.append(address)

    def _parts(self, expert, address):
        gate, up, down = (address + part.offset for part in LAYOUTS[expert.layer].parts)
        return gate, up, down

    def view(self, expert):
        if expert not in self.places:
            return View((0, 0, 0), in_ram=False)
        return View(self._parts(expert, self.places[expert]), in_ram=True, dma=self.pinned)

    def addresses(self, layer):
        raise AssertionError("the table is asked, not the source")

    def read_into(self, expert, buffer):
        return super().read_into(expert, buffer)

    def begin_demote(self, expert):
        if expert in self.places or not self.free:
            return None
        move = Move(expert, "demote", self._parts(expert, self.free.pop()), self.pinned)
        self.open.append(move)
        return move

    def begin_promote(self, expert):
        if expert not in self.places:
            return None
        self.open.append(Move(expert, "promote", None))
        return self.open[-1]

    def commit(self, move):
        self.open.remove(move)
        if move.kind == "promote":
            self.free.append(self.places.pop(move.expert))
            return
        address = move.parts[0]
        copy = bytes_at(address, len(BLOBS[move.expert]))
        if not np.array_equal(copy, BLOBS[move.expert]):
            self.free.append(address)
            raise StrataError(f"the copy of {move.expert} is wrong", "it had not landed")
        self.places[move.expert] = address

    def abort(self, move):
        self.open.remove(move)
        if move.kind == "demote":
            self.free.append(move.parts[0])

    def check(self):
        assert self.open == []
        for expert, address in self.places.items():
            assert np.array_equal(bytes_at(address, len(BLOBS[expert])), BLOBS[expert])


class Table:
    """Remembers what rounds would find; what it is told is checked at once."""

    def __init__(self, lab):
        self.lab, self.slots, self.refreshed, self.refuse = lab, {}, [], None

    def publish(self, swaps):
        if self.refuse is not None:
            raise self.refuse
        for pair, slot in swaps:
            blob = BLOBS[pair.entering]
            assert np.array_equal(bytes_at(slot, len(blob)), blob), "it has not landed"
            del self.slots[pair.leaving]
            self.slots[pair.entering] = slot

    def refresh(self, experts):
        self.refreshed += experts


class Lab:
    def __init__(self, make_source, inside=ALL[:6], faults=None, spare=2):
        self.runtime = SimRuntime(SimHardware(vram=(64 * MIB,)), faults=faults)
        self.runtime.open_context(0)
        self.ledger = Ledger(devices=1)
        self.held = Held(self.runtime, self.ledger)
        sizes = {-(-x.nbytes // 256) * 256: spare for x in LAYOUTS.values()}
        self.pool = make_slots(self.held, 0, inside, LAYOUTS, sizes)
        for expert, at in self.pool.places.items():
            bytes_at(at, len(BLOBS[expert]))[:] = BLOBS[expert]
        self.source = make_source(self.held)
        self.demand = Demand.of(LAYOUTS, COUNT, ALL)
        self.demand.put_inside(inside)
        self.table = Table(self)
        self.table.slots = dict(self.pool.places)
        each = staging_bytes(max(x.nbytes for x in LAYOUTS.values()))
        start = self.held.pinned(4 * each, "buffers")
        self.reports = []
        self.jobs = Beside("test-beside")
        self.swapper = Swapper(
            runtime=self.runtime,
            pool=self.pool,
            layouts=LAYOUTS,
            source=self.source,
            table=self.table,
            policy=self.demand,
            jobs=self.jobs,
            degrade=self.reports.append,
            patience=120.0,
            buffers=[start + n * each for n in range(4)],
        )

    def check(self):
        """What rounds find is right, and is what the pool and the policy believe."""
        assert self.table.slots == self.pool.places
        for expert, at in self.table.slots.items():
            assert np.array_equal(bytes_at(at, len(BLOBS[expert])), BLOBS[expert])
        inside = {e for e in ALL if self.demand.inside[self.demand.number(e)]}
        assert inside == set(self.pool.places)
        slots = [*self.pool.places.values(), *(s for row in self.pool.spare.values() for s in row)]
        assert len(set(slots)) == len(slots)

    def ticks(self, pairs=(), most=200):
        """Rounds until nothing is under way; how many."""
        back = self.swapper.tick(pairs)
        for number in range(most):
            self.check()
            if not self.swapper.under_way:
                return number, back
            self.await_jobs()
            back += self.swapper.tick(())
        raise AssertionError("it does not end")

    def await_jobs(self):
        """Wait for the threads that read, store and launch copies, however long they take."""
        jobs = [job for swap in self.swapper._open for job in (swap.reading, swap.storing)]
        wait([job for job in jobs if job is not None])
        if self.swapper._waves._launching is not None:
            self.swapper._waves._launching.wait(None)

    def close(self):
        for _ in range(2):
            self.jobs.close(120.0)
            self.swapper.close()
        if isinstance(self.source, Resident):
            assert self.source.open == []
        self.held.close()
        assert self.ledger.outstanding() == ()
        assert self.runtime.leaks() == []
        self.runtime.close()
        assert self.runtime.breaches == []


def resident(pinned=True, inside=ALL[:6], spare=2):
    return lambda held: Resident(held, inside, pinned, spare)


SOURCES = {
    "files": lambda held: Files(),
    "files with a pad": lambda held: Files(512),
    "resident": resident(),
    "resident, pageable": resident(pinned=False),
}
