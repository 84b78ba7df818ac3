"""Prompts that fail, or cannot bring an expert: who fails, and what the next ones find."""

from collections import Counter

import numpy as np
import pytest
from prompt_bench import EXPERTS, IDS, LAYERS, Bound, answer, chunk

from strata_core.cache.lend import lend
from strata_core.cache.waiting import STRETCH, Patience
from strata_core.errors import EngineError, StrataError
from strata_core.interfaces import Expert
from strata_core.memory.address import bytes_at
from strata_core.testing.sim import SimFaults


def faulty(bound, verb, nth):
    """Have the n-th call of a verb from now on fail."""
    bound.runtime.faults = SimFaults({verb: bound.runtime._calls[verb] + nth})


@pytest.mark.parametrize("verb", ["launch", "copy", "record", "wait", "finished"])
@pytest.mark.parametrize("nth", [1, 3, 9])
def test_a_failure_in_a_prompt_leaves_the_next_one_right(lab, tiny_file, expected, verb, nth):
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8)
    faulty(bound, verb, nth)
    slot = bound.executor.open_sequence()
    with pytest.raises(StrataError, match=verb):
        bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
    bound.executor.close_sequence(slot)
    assert answer(bound.executor, 33) == expected
    assert all(same for _, same in bound.slots())
    assert bound.source.held == []
    bound.close()


def test_a_source_that_fails_names_the_expert_and_serves_again(lab, tiny_file, expected):
    bound = Bound(lab, tiny_file(), 33, "mapped", expert_cache=8)
    read_into, broken = bound.source.read_into, [Expert(1, 2)]

    def failing(expert, buffer):
        if expert in broken:
            raise StrataError(f"{expert} cannot be read", "the file is gone", "put it back")
        return read_into(expert, buffer)

    bound.source.read_into = failing
    slot = bound.executor.open_sequence()
    with pytest.raises(StrataError, match="expert 2 of layer 1 cannot be read"):
        bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
    bound.executor.close_sequence(slot)
    broken.clear()
    assert answer(bound.executor, 33) == expected
    bound.close()


def fail_second_views(bound, victims, error):
    """Have the source's second view of each victim fail: the chunk brings it, and it stays out."""
    view, calls = bound.source.view, Counter()

    def failing(expert):
        calls[expert] += 1
        if expert in victims and calls[expert] == 2:
            raise error
        return view(expert)

    bound.source.view = failing


def up_to_date(timetable):
    """The demand, when it knows of all that has happened."""
    for _ in range(2):  # a plan that is being made knows of less
        if timetable._planning is not None:
            assert timetable._planning.wait(120.0)
            timetable.due()
        timetable._rounds = timetable.pace.every
        timetable.begin()
    assert timetable._planning.wait(120.0)
    return timetable.demand


ERRORS = [StrataError("it cannot be read", "the disk is gone", "mend it"), ZeroDivisionError("oh")]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("cache", [8, 15])
@pytest.mark.parametrize("source", ["mapped", "page-locked", "held for a layer"])
def test_lent_experts_that_cannot_come_back_are_misses_like_any_other(
    lab, tiny_file, expected, source, cache, every, error
):
    """Also where rounds had no other lane for its layer, since all of it was in slots."""
    bound = Bound(
        lab, tiny_file(), 70, source, expert_cache=cache, adapt_every=every, adapt_swaps=2
    )
    assert answer(bound.executor, 70) == expected
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    if every:
        assert bound.executor._adaptation.rest(), "who is in a slot now is lent"
    inside = Counter(expert.layer for expert in pool.places)
    lent = lend(pool, prompts.borrowed.largest).experts
    (fullest, most), *_ = inside.most_common()
    assert cache == 8 or most == EXPERTS
    victims = {expert for expert in lent if expert.layer == fullest}
    before = bound.executor.counters()["hit"]["experts"]
    fail_second_views(bound, victims, error)
    slot = bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:33], 0, slot, [32]))
    assert not victims & set(pool.places)
    bound.executor.close_sequence(slot)
    for _ in range(2):
        assert answer(bound.executor, 70) == expected
        assert all(same for _, same in bound.slots())
    assert bound.executor.counters()["hit"]["experts"] > before
    (told,) = lab.degradations
    assert told.what in {
        f"{victim} did not come back to the cache of SIM0 after a prompt" for victim in victims
    }
    assert ("ZeroDivisionError" in told.why) == isinstance(error, ZeroDivisionError)
    if every == 0:
        assert not victims & set(pool.places)
    else:
        demand = up_to_date(bound.executor._adaptation.timetable)
        inside = {demand.expert(int(n)) for n in np.flatnonzero(demand.inside)}
        assert inside == set(pool.places), "the policy knows who is in no slot"
    bound.close()


@pytest.mark.parametrize("every", [0, 1])
def test_where_no_lent_expert_comes_back_prompts_have_their_buffers_still(
    lab, tiny_file, expected, every
):
    bound = Bound(lab, tiny_file(), 33, "mapped", expert_cache=6, adapt_every=every, adapt_swaps=2)
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    loan = lend(pool, prompts.borrowed.largest)
    fail_second_views(bound, set(loan.experts), ERRORS[0])
    slot = bound.executor.open_sequence()
    for start in (0, 33):
        bound.executor.run(chunk(IDS[:33], start, slot, [32]))
    bound.executor.close_sequence(slot)
    assert not set(loan.experts) & set(pool.places)
    for _ in range(2):
        assert answer(bound.executor, 33) == expected
        assert all(same for _, same in bound.slots())
    assert set(lend(pool, prompts.borrowed.largest, vacated=prompts.lost.vacated).buffers) >= set(
        loan.buffers
    )
    assert len(lab.degradations) == 1, "the others are alike"
    bound.close()


def test_only_who_asks_for_an_expert_that_cannot_be_read_fails(lab, tiny_file):
    healthy = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8, adapt_every=0)
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8, adapt_every=0)
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    victim = lend(pool, prompts.borrowed.largest).experts[-1]
    fail_second_views(bound, {victim}, ERRORS[0])
    slot = bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:33], 0, slot, [32]))
    bound.executor.close_sequence(slot)
    view = bound.source.view

    def broken(expert):
        if expert == victim:
            raise StrataError(f"{expert} cannot be read", "the disk is gone", "mend it")
        return view(expert)

    bound.source.view = broken
    outcomes = set()
    for token in IDS[:24]:
        before = healthy.executor.picks()[victim.layer][victim.index]
        window = chunk([token], 0, healthy.executor.open_sequence(), [0], "window")
        wanted = healthy.executor.run(window).copy()
        healthy.executor.close_sequence(int(window.slots[0]))
        asked = healthy.executor.picks()[victim.layer][victim.index] > before
        window = chunk([token], 0, bound.executor.open_sequence(), [0], "window")
        outcomes.add(bool(asked))
        if asked:
            with pytest.raises(StrataError, match=f"{victim} cannot be read"):
                bound.executor.run(window)
        else:
            assert bound.executor.run(window).tobytes() == wanted.tobytes()
        bound.executor.close_sequence(int(window.slots[0]))
    assert outcomes == {True, False}
    healthy.close()
    bound.close()


@pytest.mark.parametrize("source", ["mapped", "held for a layer"])
def test_a_long_chunk_does_without_an_expert_that_no_token_asks_for(lab, tiny_file, source):
    bound = Bound(lab, tiny_file(), 40, source, expert_cache=6, adapt_every=0)
    executor, prompts = bound.executor, bound.executor._prompts

    def run():
        slot = executor.open_sequence()
        try:
            return executor.run(chunk(np.full(40, 7), 0, slot, [39])).copy()
        finally:
            executor.close_sequence(slot)

    wanted = run()
    outside = [Expert(n, i) for n in range(LAYERS) for i in range(EXPERTS)]
    outside = [e for e in outside if e not in prompts.borrowed.slots]
    asked = {e for e in outside if executor.picks()[e.layer][e.index]}
    view, broken = bound.source.view, set()

    def failing(expert):
        if expert in broken:
            raise StrataError(f"{expert} cannot be read", "the disk is gone", "mend it")
        return view(expert)

    bound.source.view = failing
    broken.update(set(outside) - asked)
    assert broken
    assert run().tobytes() == wanted.tobytes()
    assert any("could not be brought for a prompt on SIM0" in d.what for d in lab.degradations)
    broken.add(min(asked))
    with pytest.raises(StrataError, match=f"{min(asked)} cannot be read"):
        run()
    broken.clear()
    assert run().tobytes() == wanted.tobytes()
    bound.close()


def test_experts_are_asked_for_one_by_one_where_a_source_does_not_read_ahead(
    lab, tiny_file, expected
):
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8, adapt_every=0)
    begin = bound.source.begin_layer
    bound.source.begin_layer = lambda layer, few: begin(layer, few) if len(few) < 2 else 1 // 0
    slot = bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:33], 0, slot, [32]))
    bound.executor.close_sequence(slot)
    bound.source.begin_layer = begin
    assert answer(bound.executor, 33) == expected
    assert all(same for _, same in bound.slots())
    assert lab.degradations == []
    bound.close()


def test_an_interrupt_in_a_chunk_leaves_the_next_one_right(lab, tiny_file, expected):
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8)
    view, calls = bound.source.view, Counter()

    def interrupted(expert):
        calls["view"] += 1
        if calls["view"] == 4:
            raise KeyboardInterrupt
        return view(expert)

    bound.source.view = interrupted
    slot = bound.executor.open_sequence()
    with pytest.raises(KeyboardInterrupt):
        bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
    bound.executor.close_sequence(slot)
    assert answer(bound.executor, 33) == expected
    assert bound.source.held == []
    bound.close()


def test_a_value_that_is_not_finite_is_named(lab, tiny_file, expected):
    bound = Bound(lab, tiny_file(), 33, expert_cache=16)
    pool = bound.backend._placements[0].pool
    layer = max(e.layer for e in pool.places)
    kept = {}
    for expert, address in pool.places.items():
        if expert.layer == layer:
            kept[address] = bytes_at(address, bound.nbytes).copy()
            bytes_at(address, bound.nbytes)[:] = 0x7F
    slot = bound.executor.open_sequence()
    with pytest.raises(StrataError, match=f"experts in layer {layer} met a value"):
        bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
    bound.executor.close_sequence(slot)
    for address, data in kept.items():
        bytes_at(address, bound.nbytes)[:] = data
    assert answer(bound.executor, 33) == expected
    bound.close()


# --- waits --------------------------------------------------------------------------------------


class Clock:
    """A second passes with each sleep of a wait of prompts."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("strata_core.cache.waiting.time", self)

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 1.0


def answer_late(runtime, polls):
    """Have every event be asked for so many times in vain after it was recorded."""
    record, finished, asked = runtime.record, runtime.finished, Counter()

    def recorded(event, stream):
        asked[event] = 0
        record(event, stream)

    def late(event):
        asked[event] += 1
        return asked[event] > polls and finished(event)

    runtime.record, runtime.finished = recorded, late


@pytest.mark.parametrize(
    ("tokens", "layers", "times"),
    [(1, 0, 1), (1, 5, 5), (STRETCH, 5, 5), (STRETCH + 1, 5, 10), (4 * STRETCH, 49, 196)],
)
def test_patience_grows_with_the_chunk(tokens, layers, times) -> None:
    patience = Patience(None, 10.0)
    assert patience.seconds == 10.0
    patience.follow(tokens, layers)
    assert patience.seconds == 10.0 * times


@pytest.mark.parametrize("size", [5, 33])
@pytest.mark.parametrize("source", ["mapped", "page-locked", "held for a layer"])
def test_every_wait_of_a_prompt_is_as_patient_as_the_chunk_is_long(
    lab, tiny_file, expected, monkeypatch, source, size
):
    """Chunks that wait for their picks and chunks that do not; copies, loans and the way back."""
    options = {"patience": 10.0, "expert_cache": 8, "adapt_every": 0}
    bound = Bound(lab, tiny_file(), size, source, **options)
    clock = Clock(monkeypatch)
    answer_late(bound.runtime, 15)
    assert answer(bound.executor, size) == expected
    assert clock.now > 10.0 * LAYERS, "there was something to wait for"
    del bound.runtime.record, bound.runtime.finished
    bound.close()


def test_a_device_that_hangs_is_given_up_and_nobody_waits_as_long_again(
    lab, tiny_file, expected, monkeypatch
):
    bound = Bound(lab, tiny_file(), 33, patience=10.0, expert_cache=8, adapt_every=0)
    clock, slot = Clock(monkeypatch), bound.executor.open_sequence()
    answer_late(bound.runtime, 10**6)
    for seconds in (10.0 * (LAYERS + 1), 10.0, 10.0):
        began = clock.now
        with pytest.raises(EngineError, match="did not come to an end") as caught:
            bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
        assert f"more than {seconds:g} s" in caught.value.why
        assert clock.now - began <= seconds + 2
    del bound.runtime.record, bound.runtime.finished
    bound.executor.close_sequence(slot)
    assert answer(bound.executor, 33) == expected
    bound.close()
