"""Swaps on the simulated accelerator: two phases, any order of events, every failure undone."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from swap_bench import ALL, BLOBS, SOURCES, Files, Lab, Resident, resident

from strata_core.cache.adaptive import Pair
from strata_core.cache.waves import Waves
from strata_core.errors import DeviceError, StrataError
from strata_core.interfaces import Expert
from strata_core.memory.address import bytes_at
from strata_core.testing.sim import VERBS, SimFaults

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
    lab.await_jobs()
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
    lab.demand.sums[[lab.demand.number(p.entering) for p in PAIRS]] = 50
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
    lab.demand.sums[lab.demand.number(Expert(5, 3))] = 60
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
        lab.await_jobs()
        lab.swapper.tick(())
    bytes_at(at, 1)[0] ^= 1
    lab.check()
    lab.source.check()
    assert Expert(0, 0) in lab.pool.places
    assert lab.swapper.counts.undone == 1
    assert len(lab.source.free) == 2
    lab.close()


def raising(error, chosen=lambda move: True, then=lambda move: None):
    """A source's method that raises for some moves, and does `then` for the others."""

    def method(move):
        if chosen(move):
            raise error
        return then(move)

    return method


def failing_begin(source):
    source.begin_demote = raising(ZeroDivisionError("oh"))


def failing_commit(source):
    source.commit = raising(
        ZeroDivisionError("oh"), lambda move: move.kind == "demote", source.commit
    )


def wrong_copy(source):
    """The contract's way: the move is aborted, then StrataError is raised."""
    commit = source.commit

    def refused(move):
        if move.kind == "promote":
            return commit(move)
        source.abort(move)
        raise StrataError(f"the copy of {move.expert} is wrong", "a bit changed", "test it")

    source.commit = refused


@pytest.mark.parametrize("breaks", [failing_begin, failing_commit, wrong_copy])
def test_who_cannot_leave_is_named_and_not_tried_again_and_the_other_one_is(breaks):
    lab = Lab(resident())
    breaks(lab.source)
    lab.ticks(PAIRS[:1])
    (leaving, entering) = PAIRS[0].leaving, PAIRS[0].entering
    (report,) = lab.reports
    assert report.what == f"{leaving} did not leave the cache of SIM0"
    assert ("ZeroDivisionError" in report.why) != (breaks is wrong_copy)
    lab.demand.sums[lab.demand.number(entering)] = 60
    (again,) = lab.demand.swaps(1)
    assert again.entering == entering
    assert again.leaving != leaving
    lab.source.open.clear()
    lab.check()
    lab.close()


@pytest.mark.parametrize("error", [StrataError("no", "the tier is lost", ""), ValueError("no")])
@pytest.mark.parametrize("call", ["commit", "abort", "begin_promote"])
def test_whatever_a_source_raises_at_a_swaps_end_the_others_end_as_well(call, error):
    """Published swaps are finished, and undone ones undone; the table's readers are told."""
    lab = Lab(resident())
    lab.swapper.tick(PAIRS)
    kind = {"commit": lambda move: move.kind == "promote"}.get(call, lambda move: True)
    setattr(lab.source, call, raising(error, kind, getattr(lab.source, call)))
    if call != "commit":
        lab.table.refuse = DeviceError("copy failed", "no reason")
    lab.ticks()
    assert lab.swapper.counts.entered == (2 if call == "commit" else 0)
    assert lab.swapper.stopped == (call != "commit")
    if call == "commit":
        assert set(lab.table.refreshed) == {e for p in PAIRS for e in (p.leaving, p.entering)}
    unended = [r for r in lab.reports if "the source did not end a move of" in r.what]
    assert len(unended) == 1, "told once"
    assert ("ValueError" in unended[0].why) == isinstance(error, ValueError)
    lab.source.open.clear()
    lab.close()


@pytest.mark.parametrize("where", ["publish", "refresh"])
def test_a_table_that_raises_anything_raises_it_nowhere_else(where):
    lab = Lab(resident())
    lab.swapper.tick(PAIRS)
    setattr(lab.table, where, raising(ZeroDivisionError("oh")))
    for _ in range(100):
        lab.await_jobs()
        assert lab.swapper.tick(()) == []
        if lab.swapper.stopped:
            break
    assert "ZeroDivisionError" in lab.reports[0].why
    assert lab.swapper.under_way == 0
    lab.source.check()
    lab.close()


def test_a_device_that_was_not_still_is_asked_again(monkeypatch):
    lab = Lab(resident())
    before = dict(lab.pool.places)
    monkeypatch.setattr(Waves, "still", lambda waves, patience: False)
    lab.table.refuse = DeviceError("copy failed", "no reason")
    lab.swapper.tick(PAIRS)
    while not lab.swapper.stopped:
        lab.swapper.tick(())
    assert not lab.swapper.settle()
    assert lab.swapper.under_way == 2
    monkeypatch.undo()
    assert lab.swapper.settle()
    assert lab.pool.places == before
    lab.source.check()
    lab.check()
    lab.close()


def test_a_read_that_takes_long_is_named_and_waited_for_again():
    lab = Lab(lambda held: Files())
    lab.source.slow = threading.Event()
    lab.swapper.patience = 0.02
    lab.swapper.tick(PAIRS[:1])
    assert not lab.swapper.settle()
    assert lab.swapper.reading() == PAIRS[0].entering
    assert lab.reports == []
    lab.source.slow.set()
    lab.swapper.patience = 120.0
    assert lab.swapper.settle()
    assert lab.swapper.reading() is None
    assert lab.swapper.counts.entered == 1
    lab.close()


def test_a_read_that_takes_long_does_not_hold_up_the_end_of_all_swaps(monkeypatch):
    lab = Lab(lambda held: Files())
    lab.source.slow = threading.Event()
    lab.swapper.patience = 0.02
    lab.swapper.tick(PAIRS[:1])
    monkeypatch.setattr(Waves, "look", lambda waves: 1 // 0)
    lab.swapper.tick(())
    assert lab.swapper.stopped
    assert lab.swapper.under_way == 1, "the read may still write into its buffer"
    lab.source.slow.set()
    lab.swapper.patience = 120.0
    assert lab.swapper.settle()
    lab.check()
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
