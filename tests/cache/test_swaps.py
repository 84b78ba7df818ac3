"""Swaps on the simulated accelerator: two phases, any order of events, every failure undone."""

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata_core.abilities import Move
from strata_core.cache.adaptive import Demand, Pair
from strata_core.cache.slots import make_slots
from strata_core.cache.staging import staging_bytes
from strata_core.cache.swaps import Swapper
from strata_core.errors import DeviceError, StrataError
from strata_core.interfaces import BlobLayout, BlobPart, Expert, View
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held
from strata_core.memory.ledger import Ledger
from strata_core.testing.sim import VERBS, SimFaults, SimHardware, SimRuntime

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
            self.slow.wait(5)
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
        self.demand.inside[[self.demand.number(e) for e in inside]] = True
        self.table = Table(self)
        self.table.slots = dict(self.pool.places)
        each = staging_bytes(max(x.nbytes for x in LAYOUTS.values()))
        start = self.held.pinned(4 * each, "buffers")
        self.reports = []
        self.swapper = Swapper(
            runtime=self.runtime,
            pool=self.pool,
            layouts=LAYOUTS,
            source=self.source,
            table=self.table,
            demand=self.demand,
            degrade=self.reports.append,
            patience=5.0,
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
            back += self.swapper.tick(())
            time.sleep(0.0005)
        raise AssertionError("it does not end")

    def close(self):
        self.swapper.close()
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

# layers 0 and 5 share a layout
PAIRS = [Pair(Expert(0, 0), Expert(5, 3)), Pair(Expert(2, 0), Expert(2, 4))]


@pytest.mark.parametrize("source", SOURCES)
def test_experts_change_places_and_nothing_is_seen_before_it_landed(source):
    lab = Lab(SOURCES[source])
    before = dict(lab.pool.places)
    spare = {size: list(row) for size, row in lab.pool.spare.items()}
    assert lab.swapper.tick(PAIRS) == []
    assert lab.table.slots == before, "the first phase shows nothing"
    lab.ticks()
    assert set(lab.pool.places) == {*before, Expert(5, 3), Expert(2, 4)} - {
        Expert(0, 0),
        Expert(2, 0),
    }
    emptied = {before[Expert(0, 0)], before[Expert(2, 0)]}
    assert emptied <= {slot for row in lab.pool.spare.values() for slot in row}
    assert {s: len(row) for s, row in lab.pool.spare.items()} == dict.fromkeys(spare, 2)
    assert lab.swapper.counts.entered == 2
    if source.startswith("resident"):
        lab.source.check()
        assert lab.swapper.counts.left == 2
        assert {Expert(0, 0), Expert(2, 0)} <= set(lab.source.places)
        assert len(lab.source.free) == 2, "the places of those that entered"
    assert lab.reports == []
    lab.close()


def test_a_swap_takes_no_wait_and_two_copies_land_together():
    lab = Lab(resident())
    calls = dict(lab.runtime.calls())
    lab.swapper.tick(PAIRS)
    after = lab.runtime.calls()
    assert after.get("synchronize", 0) == calls.get("synchronize", 0)
    assert after["record"] - calls.get("record", 0) == 2, "one event for all copies of a round"
    assert after["wait"] - calls.get("wait", 0) == 1
    assert lab.ticks()[0] <= 2
    assert lab.runtime.calls().get("synchronize", 0) == calls.get("synchronize", 0)
    lab.close()


def test_pairs_without_room_come_back():
    lab = Lab(resident(spare=0), spare=1)
    more = Pair(Expert(5, 0), Expert(0, 4))
    assert lab.swapper.tick([*PAIRS, more]) == [more], "layers 0 and 5 have one empty slot"
    _, back = lab.ticks()
    assert (lab.swapper.counts.entered, back) == (2, [])
    assert lab.swapper.counts.left == 0, "there was no place for them"
    lab.close()


def test_what_is_under_way_is_in_no_other_pair():
    lab = Lab(resident())
    lab.demand.counts[[lab.demand.number(p.entering) for p in PAIRS]] = 50
    assert {p.entering for p in lab.demand.swaps(9)} == {p.entering for p in PAIRS}
    lab.swapper.tick(PAIRS)
    assert lab.demand.swaps(9) == []
    lab.ticks()
    assert lab.demand.swaps(9) == []
    lab.close()


def test_a_read_that_fails_is_undone_and_told_once_and_the_others_go_on():
    lab = Lab(lambda held: Files())
    lab.source.broken = {Expert(5, 3), Expert(0, 4)}
    lab.ticks([*PAIRS, Pair(Expert(5, 0), Expert(0, 4))])
    assert lab.swapper.counts.entered == 1
    assert lab.swapper.counts.undone == 2
    assert Expert(2, 4) in lab.pool.places
    (report,) = lab.reports
    assert str(Expert(5, 3)) in report.what
    assert "the disk is gone" in report.why
    lab.demand.counts[lab.demand.number(Expert(5, 3))] = 60
    assert lab.demand.swaps(9) == [], "it is not tried again"
    lab.close()


def test_a_plugins_own_exception_is_no_worse():
    lab = Lab(lambda held: Files())
    lab.source.read_into = lambda expert, buffer: 1 // 0
    lab.ticks(PAIRS)
    assert lab.swapper.counts.undone == 2
    assert "ZeroDivisionError" in lab.reports[0].why
    lab.close()


def test_a_copy_that_is_found_wrong_keeps_the_expert_in_its_slot():
    lab = Lab(resident(pinned=False))
    at = lab.pool.places[Expert(0, 0)]
    bytes_at(at, 1)[0] ^= 1
    lab.swapper.tick(PAIRS[:1])
    while lab.swapper.under_way:
        lab.swapper.tick(())
        time.sleep(0.0005)
    bytes_at(at, 1)[0] ^= 1
    lab.check()
    lab.source.check()
    assert Expert(0, 0) in lab.pool.places
    assert lab.swapper.counts.undone == 1
    assert len(lab.source.free) == 2
    lab.close()


@pytest.mark.parametrize("source", ["files", "resident", "resident, pageable"])
@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"close", "take_error"}))
def test_whatever_verb_fails_the_old_state_stays(source, verb):
    counted = Lab(SOURCES[source])
    begin = counted.runtime.calls().get(verb, 0)
    counted.ticks(PAIRS)
    last = counted.runtime.calls().get(verb, 0)
    counted.close()
    for nth in range(begin + 1, last + 1):
        lab = Lab(SOURCES[source], faults=SimFaults({verb: nth}))
        lab.ticks(PAIRS)
        if lab.swapper.stopped:
            (report,) = lab.reports
            assert "no longer change places on SIM0" in report.what
            assert lab.swapper.tick(PAIRS) == []
            assert lab.swapper.under_way == 0
        assert lab.runtime.take_error() is None, "later verbs must not fail for it"
        if isinstance(lab.source, Resident):
            lab.source.check()
            assert len(lab.source.free) == 2
        lab.check()
        lab.close()


def test_a_table_that_is_refused_undoes_all_of_its_swaps():
    lab = Lab(resident())
    before = dict(lab.pool.places)
    lab.table.refuse = DeviceError("copy failed", "no reason")
    lab.ticks(PAIRS)
    assert lab.pool.places == before
    lab.source.check()
    assert not {Expert(0, 0), Expert(2, 0)} & set(lab.source.places), "their copies are given up"
    assert len(lab.source.free) == 2
    assert lab.swapper.stopped
    lab.close()


def test_closing_in_the_middle_gives_everything_back():
    for rounds in range(4):
        for source in SOURCES.values():
            lab = Lab(source)
            lab.swapper.tick(PAIRS)
            for _ in range(rounds):
                lab.swapper.tick(())
            lab.close()


def test_settling_waits_for_what_is_under_way():
    lab = Lab(SOURCES["resident, pageable"])
    lab.swapper.tick(PAIRS)
    assert lab.swapper.settle()
    assert lab.swapper.counts.entered == 2
    lab.check()
    lab.close()


class SwapMachine(RuleBasedStateMachine):
    """Swaps begin, go on, are waited for, meet failing reads; rounds may look at any time."""

    @initialize(
        kind=st.sampled_from(["files", "pinned", "pageable"]),
        inside=st.sets(st.sampled_from(ALL), min_size=1, max_size=10),
        spare=st.integers(1, 3),
        places=st.integers(0, 3),
    )
    def start(self, kind, inside, spare, places):
        chosen = sorted(inside)
        source = (
            (lambda held: Files(64))
            if kind == "files"
            else resident(kind == "pinned", chosen, places)
        )
        self.lab = Lab(source, chosen, spare=spare)
        self.places = places

    @rule(data=st.data())
    def ask(self, data):
        numbers = st.lists(st.integers(0, len(ALL) - 1), min_size=1, max_size=6)
        self.lab.demand.round(np.array(data.draw(numbers)))

    @rule(most=st.integers(1, 6))
    def begin(self, most):
        self.lab.swapper.tick(self.lab.demand.swaps(most, 0.4))

    @rule()
    def go_on(self):
        self.lab.swapper.tick(())

    @rule()
    def settle(self):
        assert self.lab.swapper.settle()

    @rule(expert=st.sampled_from(ALL))
    def break_or_mend(self, expert):
        self.lab.source.broken ^= {expert}

    @invariant()
    def rounds_find_the_right_bytes(self):
        if hasattr(self, "lab"):
            self.lab.check()

    @invariant()
    def the_source_has_the_files_bytes(self):
        if hasattr(self, "lab") and isinstance(self.lab.source, Resident):
            for expert, address in self.lab.source.places.items():
                assert np.array_equal(bytes_at(address, len(BLOBS[expert])), BLOBS[expert])

    def teardown(self):
        if hasattr(self, "lab"):
            assert not self.lab.swapper.stopped
            self.lab.close()


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
