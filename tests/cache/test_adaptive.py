"""Which experts change places: what must hold for any counts, and how the policy behaves."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.cache import adaptive
from strata_core.cache.adaptive import (
    EXCHANGE_MARGIN,
    HEAVY,
    HORIZON,
    MARGIN,
    Demand,
    Pair,
    Timetable,
)
from strata_core.interfaces import BlobLayout, BlobPart, Expert
from strata_core.plan.moving import Pace, slot_bytes, spares, spares_by_size
from strata_core.testing.jobs import AtOnce

EXPERTS = 6


def layout(rows: int) -> BlobLayout:
    names = ("gate", "up", "down")
    parts = tuple(
        BlobPart(name, "F32", rows, 32, n * rows * 128, rows * 128) for n, name in enumerate(names)
    )
    return BlobLayout(parts, 3 * rows * 128)


LAYOUTS = {0: layout(4), 3: layout(9), 5: layout(4)}
ALL = [Expert(layer, index) for layer in LAYOUTS for index in range(EXPERTS)]
floats = st.floats(0, 64, width=32)


def make(counts=None, inside=(), barred=(), ranking=ALL, weight=1.0):
    demand = Demand.of(LAYOUTS, EXPERTS, ranking)
    demand.weight = weight
    if counts is not None:
        demand.sums[:] = np.multiply(counts, weight)
    demand.put_inside(inside)
    for expert in barred:
        demand.bar(expert)
    return demand


@st.composite
def situations(draw):
    counts = draw(st.lists(floats, min_size=len(ALL), max_size=len(ALL)))
    inside = draw(st.sets(st.sampled_from(ALL)))
    barred = draw(st.sets(st.sampled_from(ALL), max_size=5))
    ranking = draw(st.permutations(ALL))
    most = draw(st.integers(0, 20))
    margin = draw(st.sampled_from([MARGIN, EXCHANGE_MARGIN, 0.5]))
    # powers of two change no digit of a count
    weight = draw(st.sampled_from([1.0, 2.0**40, HEAVY / 2]))
    return make(counts, inside, barred, ranking, weight), inside, barred, most, margin


@settings(max_examples=200, deadline=None)
@given(situations())
def test_swaps_keep_every_rule(situation):
    demand, inside, barred, most, margin = situation
    pairs = demand.swaps(most, margin)
    assert pairs == demand.swaps(most, margin), "the same counts give the same swaps"
    assert len(pairs) <= most
    moved = [e for pair in pairs for e in (pair.leaving, pair.entering)]
    assert len(set(moved)) == len(moved), "an expert is in one pair"
    assert not set(moved) & barred
    count = dict(zip(ALL, demand.counts[[demand.number(e) for e in ALL]], strict=True))
    leads = [count[pair.entering] - count[pair.leaving] for pair in pairs]
    for pair in pairs:
        assert pair.leaving in inside
        assert pair.entering not in inside
        assert LAYOUTS[pair.leaving.layer] == LAYOUTS[pair.entering.layer]
    assert all(lead > margin for lead in leads)
    assert leads == sorted(leads, reverse=True), "what gains most comes first"


@settings(max_examples=100, deadline=None)
@given(situations())
def test_nothing_worth_while_is_left_and_nothing_comes_back(situation):
    demand, _, barred, _, margin = situation
    pairs = demand.swaps(len(ALL), margin)
    for pair in pairs:
        demand.moved(pair)
    assert demand.swaps(len(ALL), margin) == []
    count = dict(zip(ALL, demand.counts[[demand.number(e) for e in ALL]], strict=True))
    held = {e for e in ALL if demand.inside[demand.number(e)]} - barred
    for one in (e for e in ALL if e not in held and e not in barred):
        for other in (e for e in held if LAYOUTS[e.layer] == LAYOUTS[one.layer]):
            assert count[one] - count[other] <= margin


def test_equal_counts_do_not_move_and_ranks_decide_between_equals():
    inside = [Expert(0, 0), Expert(0, 1), Expert(5, 0)]
    assert make(np.full(len(ALL), 30.0), inside).swaps(20) == []
    demand = make(np.zeros(len(ALL)), inside)
    for expert in (Expert(5, 4), Expert(0, 5)):
        demand.sums[demand.number(expert)] = 9
    # of the equal ones inside the one that ranks last leaves first; (0, 5) ranks before (5, 4)
    assert demand.swaps(1) == [Pair(Expert(5, 0), Expert(0, 5))]


def test_counts_are_rounds_of_the_horizon():
    demand = make()
    often, once = Expert(0, 1), Expert(5, 2)
    for _ in range(HORIZON * 8):
        demand.round(np.array([demand.number(often)] * 3))
    assert demand.counts[demand.number(often)] == pytest.approx(HORIZON, rel=0.01)
    demand.round(np.array([demand.number(once)]))
    assert demand.counts[demand.number(once)] == 1


asked_for = st.lists(st.integers(0, len(ALL) - 1), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(floats, min_size=len(ALL), max_size=len(ALL)), st.lists(asked_for, max_size=60))
def test_counts_are_what_decay_leaves_of_every_use(begin, history):
    demand, again = make(begin), make(begin)
    exact = [Fraction(count) for count in begin]
    for asked in history:
        numbers = np.array(asked, np.int64)
        demand.round(numbers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adaptive, "HEAVY", 2.0)
            again.round(numbers)
        exact = [count * (HORIZON - 1) / HORIZON + (n in asked) for n, count in enumerate(exact)]
    assert again.weight < 2
    assert np.array_equal(demand.counts, again.counts), "to make sums smaller changes no digit"
    for count, wanted in zip(demand.counts.tolist(), exact, strict=True):
        assert abs(Fraction(count) - wanted) <= wanted / 10**12


def test_counts_hold_for_as_long_as_anybody_decodes():
    demand = make()
    always, once, at_last = np.array([1]), np.array([2]), np.array([3])
    demand.round(once)
    heaviest = 0.0
    for _ in range(50_000):
        demand.round(always)
        heaviest = max(heaviest, demand.weight)
    assert HEAVY / 2 < heaviest < HEAVY, "it became so heavy, and was made smaller"
    demand.round(at_last)
    counts = demand.counts
    assert counts[1] == pytest.approx(HORIZON - 1, rel=1e-9)
    assert counts[2] < 1e-300
    assert counts[3] == 1
    assert np.isfinite(counts).all()


def test_a_profile_is_where_counts_begin():
    rates = [1.0 if e == Expert(3, 2) else 0.1 for e in ALL]
    demand = Demand.of(LAYOUTS, EXPERTS, ALL, rates)
    assert demand.counts[demand.number(Expert(3, 2))] == HORIZON
    demand.put_inside([Expert(3, 2)])
    for _ in range(HORIZON // 2):
        demand.round(np.array([demand.number(Expert(3, 0))]))
    assert demand.swaps(9) == [], "half a horizon does not outweigh what was always asked for"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_alternating_texts_do_not_thrash(every, swaps, seed):
    """Two experts asked for in turn, one slot: it changes hands rarely or never."""
    demand = make(inside=[Expert(0, 0)])
    timetable = Timetable(Pace(every, swaps), demand, AtOnce())
    rng = np.random.default_rng(seed)
    done = 0
    for _ in range(400):
        timetable.begin()
        timetable.round(np.array([int(rng.random() < 0.5)]))
        for pair in timetable.due():
            timetable.moved(pair)
            done += 1
    assert done <= 400 // HORIZON * 4


NOBODY = np.array([], np.int64)


def rounds(timetable, count, asked=NOBODY):
    """The pairs that begin after each of some rounds, in none of which one ends."""
    found = []
    for _ in range(count):
        timetable.begin()
        timetable.round(asked)
        found.append(timetable.due())
    return found


def test_swaps_are_spread_over_the_rounds_of_a_period():
    counts = np.zeros(len(ALL))
    inside = [Expert(layer, n) for layer in (0, 5) for n in range(3)]
    demand = make(counts, inside)
    for layer in (0, 5):
        for n in range(3, 6):
            demand.sums[demand.number(Expert(layer, n))] = 20 + n
    timetable = Timetable(Pace(3, 5), demand, AtOnce())
    assert rounds(timetable, 1) == [[]], "what the first round asked for is planned beside the next"
    begun = rounds(timetable, 3)
    assert [len(pairs) for pairs in begun] == [2, 2, 1]
    assert len({pair.entering for pairs in begun for pair in pairs}) == 5
    (again,) = rounds(timetable, 1)
    assert len(again) == 2, "planned anew in the next period"
    timetable.put_back(again[1:])
    assert timetable.due()[0] == again[1]


def test_who_is_in_no_slot_any_more_leaves_in_no_pair():
    inside = ALL[:4]
    demand = make([0.0] * 4 + [30.0] * (len(ALL) - 4), inside)
    timetable = Timetable(Pace(3, 5), demand, AtOnce())
    rounds(timetable, 2)
    waiting = [pair.leaving for pair in timetable._waiting]
    assert waiting
    timetable.gone(waiting[0])
    assert [pair.leaving for pair in timetable._waiting] == waiting[1:]
    pairs = [pair for begun in rounds(timetable, 30) for pair in begun]
    assert pairs
    assert {pair.leaving for pair in pairs} == set(inside) - {waiting[0]}


@pytest.mark.parametrize(
    ("pace", "at_once"),
    [(Pace(4, 96), 24), (Pace(4, 5), 2), (Pace(1, 96), 96), (Pace(0, 96), 0), (Pace(4, 0), 0)],
)
def test_a_pace_says_how_many_begin_at_once(pace, at_once):
    assert pace.at_once == at_once
    assert Pace.of({}) == Pace() == Pace(0, 0)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(ALL)), st.integers(0, 99))
def test_spares_are_few_and_only_where_somebody_may_enter(held, at_once):
    found = spares_by_size(held, LAYOUTS, EXPERTS, at_once)
    for size, count in found.items():
        same = [e for e in ALL if slot_bytes(LAYOUTS[e.layer]) == size]
        mine = [e for e in held if slot_bytes(LAYOUTS[e.layer]) == size]
        assert count <= min(at_once, len(mine))
        assert (count > 0) == (at_once > 0 and 0 < len(mine) < len(same))
        assert count == spares(len(mine), len(same), at_once)
