"""Planning beside rounds: plans that are there at once, late, never, or wrong; whoever waits."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from swap_bench import ALL, COUNT, LAYOUTS, Files, Lab, Told, resident

from strata_core.cache.adaptive import Demand, Pair, Timetable
from strata_core.cache.beside import Beside
from strata_core.errors import EngineError, StrataError
from strata_core.interfaces import Expert
from strata_core.kernels.device.adapting import Adaptation
from strata_core.plan.moving import Pace
from strata_core.testing.jobs import AtOnce

GUARD = 120.0
FIRST, SECOND = Pair(Expert(0, 0), Expert(5, 3)), Pair(Expert(2, 0), Expert(2, 4))


class Bench:
    """An adaptation over a lab; `jobs` do the planning, the lab's own thread the copies."""

    def __init__(self, jobs, source=None, pace=None, inside=ALL[:6], **more):
        self.jobs = jobs
        self.lab = Lab(source or resident(), inside, policy_of=self._timetable(pace), **more)
        lab = self.lab
        self.adaptation = Adaptation(self.timetable, lab.swapper, lab.table, jobs)

    def _timetable(self, pace):
        def make(demand):
            self.timetable = Timetable(pace or Pace(1, 8), demand, self.jobs)
            return self.timetable

        return make

    def want(self, *experts, uses=40.0):
        self.lab.demand.sums[[self.lab.demand.number(e) for e in experts]] = uses

    def round(self, *asked):
        """One round; what it brings lands in it."""
        self.adaptation.before()
        self.lab.await_jobs()
        self.adaptation.after(np.array([self.lab.demand.number(e) for e in asked], np.int64))

    def begun(self):
        return {swap.pair for swap in self.lab.swapper._open}

    def close(self):
        self.adaptation.close()
        self.adaptation.close()
        self.lab.close()


@pytest.fixture(params=["at once", "beside"])
def thread(request):
    """Jobs of either kind, and a wait until they are done."""
    return AtOnce() if request.param == "at once" else Beside("test-planner")


def planned(bench):
    planning = bench.timetable._planning
    return planning is None or planning.wait(GUARD)


def test_what_a_round_asked_for_is_planned_beside_the_next_and_begins_after_it(thread):
    bench = Bench(thread)
    bench.want(FIRST.entering, SECOND.entering)
    bench.round(FIRST.entering)
    assert bench.begun() == set(), "nothing is planned between rounds"
    bench.adaptation.before()
    assert planned(bench)
    bench.round()
    assert {pair.entering for pair in bench.begun()} == {FIRST.entering, SECOND.entering}
    while bench.begun():
        bench.round()
    assert {FIRST.entering, SECOND.entering} <= set(bench.lab.table.slots)
    bench.lab.check_rounds()
    bench.close()


def test_a_planner_that_is_behind_is_waited_for_by_nobody():
    jobs = Told()
    bench = Bench(jobs, pace=Pace(1, 1))
    bench.want(FIRST.entering)
    for _ in range(5):
        bench.round(Expert(2, 3))
        assert bench.begun() == set()
        assert len(jobs.waiting) <= 1, "one plan at a time"
    jobs.run()
    bench.round()
    assert {pair.entering for pair in bench.begun()} == {FIRST.entering}
    bench.round()
    jobs.run()
    counts = bench.lab.demand.counts
    assert counts[bench.lab.demand.number(Expert(2, 3))] > 4.5, "no round is forgotten"
    assert bench.adaptation.rest(), "who needs the slots does not need the plan"
    bench.close()


def test_a_late_plan_that_does_not_know_of_a_swap_does_not_touch_it():
    jobs = Told()
    bench = Bench(jobs, pace=Pace(1, 2), spare=1)
    entering = {Expert(0, 4), Expert(5, 3)}
    bench.want(*entering)
    bench.round()
    bench.adaptation.before()
    jobs.run()
    bench.round()
    (first,) = bench.begun()
    assert len(bench.timetable._waiting) == 1, "there is one empty slot for both"
    # planned here, but the plan is not there when the other one begins
    for _ in range(2):
        bench.round()
    (second,) = bench.begun()
    assert {first.entering, second.entering} == entering
    jobs.run()
    assert second.entering in {pair.entering for pair in bench.timetable._planning.result()}
    bench.adaptation.after(np.array([], np.int64))
    assert bench.begun() == {second}
    assert bench.timetable._waiting == []
    bench.close()


def test_a_plan_made_before_a_slot_was_taken_away_leaves_its_expert_alone():
    jobs = Told()
    bench = Bench(jobs)
    bench.want(FIRST.entering, SECOND.entering)
    bench.round()
    bench.adaptation.before()
    jobs.run()
    leaving = {pair.leaving for pair in bench.timetable._planning.result()}
    gone = sorted(leaving)[0]
    assert bench.adaptation.rest()
    for places in (bench.lab.pool.places, bench.lab.table.slots):
        del places[gone]
    bench.adaptation.gone(gone)
    bench.round()
    assert {pair.leaving for pair in bench.begun()} == leaving - {gone}
    bench.lab.check_rounds()
    bench.close()


@pytest.mark.parametrize("error", [StrataError("no plan", "it is lost", ""), ValueError("lost")])
def test_a_planner_that_raises_is_told_of_once_and_everything_stays(thread, monkeypatch, error):
    bench = Bench(thread)
    bench.want(FIRST.entering, SECOND.entering)
    bench.round()
    bench.adaptation.before()
    assert planned(bench)
    bench.round()
    assert bench.begun(), "swaps are under way when it happens"
    before = dict(bench.lab.table.slots)

    def fail(*given):
        raise error

    monkeypatch.setattr(Demand, "swaps", fail)
    bench.adaptation.before()
    assert planned(bench)
    assert bench.lab.reports == [], "no thread but the rounds' tells of it"
    for _ in range(3):
        bench.round(FIRST.entering)
        assert bench.lab.swapper.stopped
    (report,) = bench.lab.reports
    assert "no longer change places on SIM0" in report.what
    assert "lost" in report.why
    assert bench.begun() == set()
    assert bench.lab.table.slots == before
    assert len(bench.timetable._asked) <= 1, "little is kept for a planner that is no more"
    bench.lab.source.check()
    bench.close()


def test_where_there_is_no_thread_for_it_experts_stay_where_they_are(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    bench = Bench(Beside("test-planner"))
    bench.want(FIRST.entering)
    bench.round()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        bench.adaptation.before()
    for _ in range(3):
        bench.round()
    (report,) = bench.lab.reports
    assert "no longer change places on SIM0" in report.what
    assert "can't start new thread" in report.why
    assert bench.lab.swapper.counts.entered == 0
    bench.close()


def slow_planner(monkeypatch):
    """What planning begins with, and what it waits for."""
    slow, begun, swaps = threading.Event(), threading.Event(), Demand.swaps

    def wait_and_plan(*given):
        begun.set()
        slow.wait(GUARD)
        return swaps(*given)

    monkeypatch.setattr(Demand, "swaps", wait_and_plan)
    return slow, begun


def test_a_planner_that_is_behind_at_the_end_is_waited_for_as_long_as_the_patience(monkeypatch):
    slow, begun = slow_planner(monkeypatch)
    bench = Bench(Beside("test-planner"))
    bench.round()
    bench.adaptation.before()
    assert begun.wait(GUARD)
    bench.lab.swapper.patience = 0.01
    with pytest.raises(EngineError, match="test-planner did not come to an end"):
        bench.adaptation.close()
    assert bench.lab.swapper._closed, "all else was ended"
    slow.set()
    bench.close()


def test_a_planner_before_copies_in_the_thread_holds_them_up_and_loses_none(monkeypatch):
    """One thread for both: what is to be copied waits, whoever needs the slots waits bounded."""
    slow, begun = slow_planner(monkeypatch)
    slow.set()
    jobs = Beside("test-planner")
    bench = Bench(jobs)
    bench.lab.swapper._waves.jobs = jobs
    bench.want(FIRST.entering, SECOND.entering)
    bench.round()
    bench.adaptation.before()
    assert planned(bench)
    slow.clear()
    begun.clear()
    # its plan begins while the next one is being made
    bench.timetable._rounds = 1
    planning, bench.timetable._planning = bench.timetable._planning, None
    bench.adaptation.before()
    assert begun.wait(GUARD)
    late, bench.timetable._planning = bench.timetable._planning, planning
    bench.adaptation.after(np.array([], np.int64))
    assert len(bench.begun()) == 2
    bench.lab.swapper.patience = 0.01
    assert not bench.adaptation.rest()
    assert len(bench.begun()) == 2
    bench.lab.check_rounds()
    slow.set()
    bench.lab.swapper.patience = GUARD
    assert late.wait(GUARD)
    assert bench.adaptation.rest()
    assert bench.lab.swapper.counts.entered == 2
    bench.close()


class PlanningMachine(RuleBasedStateMachine):
    """Rounds, whose plans come when they like; slots that are taken away; sources that fail."""

    @initialize(
        files=st.booleans(),
        inside=st.sets(st.sampled_from(ALL), min_size=1, max_size=10),
        spare=st.integers(1, 3),
        places=st.integers(0, 3),
        every=st.integers(1, 3),
        swaps=st.integers(1, 6),
    )
    def start(self, files, inside, spare, places, every, swaps):
        chosen = sorted(inside)
        source = (lambda held: Files(64)) if files else resident(True, chosen, places)
        self.jobs = Told()
        self.bench = Bench(self.jobs, source, Pace(every, swaps), chosen, spare=spare)
        self.timetable, self.swapper = self.bench.timetable, self.bench.lab.swapper
        self.timetable.margin = 0.4
        self.asked, self.lost = [], 0

    @rule(data=st.data())
    def round(self, data):
        numbers = st.lists(st.integers(0, len(ALL) - 1), min_size=1, max_size=6)
        asked = np.array(data.draw(numbers))
        self.bench.adaptation.before()
        self.asked.append(asked)
        self.bench.adaptation.after(asked)

    @rule()
    def copies_land(self):
        self.bench.lab.await_jobs()

    @rule()
    def plan(self):
        self.jobs.run()

    @rule()
    def rest(self):
        assert self.bench.adaptation.rest()

    @rule(expert=st.sampled_from(ALL))
    def break_or_mend(self, expert):
        self.bench.lab.source.broken ^= {expert}

    @precondition(lambda self: hasattr(self, "bench") and self.bench.lab.pool.places)
    @rule(data=st.data())
    def slot_is_lost(self, data):
        assert self.bench.adaptation.rest()
        lab = self.bench.lab
        expert = data.draw(st.sampled_from(sorted(lab.pool.places)))
        for places in (lab.pool.places, lab.table.slots):
            del places[expert]
        self.bench.adaptation.gone(expert)

    @invariant()
    def rounds_find_the_right_bytes(self):
        if hasattr(self, "bench"):
            self.bench.lab.check_rounds()

    @invariant()
    def nobody_is_in_two_swaps(self):
        if hasattr(self, "bench"):
            pairs = self.bench.begun()
            moving = [e for pair in pairs for e in (pair.leaving, pair.entering)]
            assert len(set(moving)) == len(moving)
            assert {pair.leaving for pair in pairs} <= set(self.bench.lab.pool.places)
            assert not {pair.entering for pair in pairs} & set(self.bench.lab.pool.places)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        assert not self.swapper.stopped
        assert self.bench.adaptation.rest()
        # two plans later, whatever was late is known
        for _ in range(2):
            self.jobs.run()
            self.timetable.due()
            self.timetable._rounds = self.timetable.pace.every
            self.timetable.begin()
        self.jobs.run()
        self.bench.lab.check()
        again = Demand.of(LAYOUTS, COUNT, ALL)
        for asked in self.asked:
            again.round(asked)
        assert np.array_equal(again.counts, self.bench.lab.demand.counts), "each counted once"
        self.bench.close()


TestPlanningMachine = PlanningMachine.TestCase
TestPlanningMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
