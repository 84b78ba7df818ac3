"""Experts of prompts ahead of the device, by the accounting clock; one set of bits at any depth.

Decoding behind a prompt costs what it did before it.
"""

import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_bench import IDS, SOURCES, Bound, answer, chunk

from strata_core.cache import stager
from strata_core.errors import UsageError
from strata_core.interfaces import View
from strata_core.kernels.device import prompt_room
from strata_core.memory.address import address_of, bytes_at
from strata_core.plan.lending import lendable

LAYERS, EXPERTS = 8, 8


@pytest.fixture
def bind(lab, tiny_file):
    """bind(cache, link=, ...): eight layers of eight experts, chunks of at most 32 tokens."""
    made = []

    def make(cache, source="page-locked", link=5e9, **options):
        runtime = lab.runtime
        lab.runtime = lambda: runtime(link=link, launch_s=6e-6, block_s=1e-7)
        checkpoint = tiny_file({"layers": LAYERS})
        made.append(Bound(lab, checkpoint, 32, source, expert_cache=cache, **options))
        lab.runtime = runtime
        return made[-1]

    yield make
    for bound in made:
        bound.close()


def timed(bound, chunks=2):
    """Times of the last of some chunks, no logits wanted."""
    prompts, slot = bound.executor._prompts, bound.executor.open_sequence()
    prompts.time_chunks(on=True)
    for number in range(chunks):
        bound.executor.run(chunk(IDS[:32], 32 * number, slot))
    return prompts.chunk_times()[-1]


@pytest.mark.parametrize("wave", [1, 16])
@pytest.mark.parametrize("cache", [16, 48])
@pytest.mark.parametrize("link", [1e9, 5e9, 8e9])
def test_a_chunk_takes_the_longer_of_copying_and_computing(bind, monkeypatch, wave, cache, link):
    """Where a layer's experts and more are on their way, the device never waits but for bytes."""
    monkeypatch.setattr(prompt_room, "WAVE", wave)
    bound = bind(cache, link=link)
    found = timed(bound)
    sums = found.sums()
    blob = bound.nbytes
    brought = EXPERTS * LAYERS - cache + lendable(cache, EXPERTS * LAYERS, LAYERS)
    assert sums["bytes"] == brought * blob
    assert sums["copy"] == pytest.approx(brought * blob / link)
    longer = max(sums["copy"], sums["compute"])
    assert longer <= found.seconds <= 1.03 * longer
    assert found.seconds <= sums["compute"] + sums["wait"] + 1e-6
    # the first layer's experts are waited for; later ones where the link is the slower of the two
    if sums["copy"] < 0.8 * sums["compute"]:
        assert sums["wait"] <= 0.01 * sums["compute"]


def test_copies_of_later_layers_begin_before_earlier_ones_are_computed(bind, monkeypatch):
    monkeypatch.setattr(prompt_room, "WAVE", 2)
    layers = [each for each in timed(bind(48, link=1e10)).layers if each.layer is not None]
    begun = {each.layer: each.copy.begin for each in layers}
    ended = {each.layer: each.compute.end for each in layers}
    for layer in range(LAYERS - 2):
        assert begun[layer + 2] < ended[layer], "two layers ahead"


def test_a_ring_of_few_buffers_waits_and_tells(bind):
    """Four slots are all that is lent: copies wait for free buffers, computing for experts."""
    sums = timed(bind(4)).sums()
    assert sums["held"] > 0.1 * sums["copy"]
    assert sums["wait"] > 0.1 * sums["compute"]


def test_a_short_prompt_borrows_two_waves_and_a_long_one_all(bind, monkeypatch):
    """Each lent slot is copied out and back, and its expert is a miss meanwhile."""
    monkeypatch.setattr(prompt_room, "WAVE", 1)
    bound = bind(16)
    borrowed, slot = bound.executor._prompts.borrowed, bound.executor.open_sequence()
    for size, lent in ((4, 2), (32, lendable(16, EXPERTS * LAYERS, LAYERS)), (4, 2)):
        bound.executor.run(chunk(IDS[:size], 0, slot, [size - 1]))
        assert sum(map(len, borrowed.ring.parts)) == lent
        bound.executor.run(chunk(IDS[size : size + 1], size, slot, [0], "window"))
        assert all(same for _, same in bound.slots())
    assert lent < len(borrowed.slots)


DEPTHS = (
    ("page-locked", 4, 16, 1),
    ("page-locked", 12, 33, 2),
    ("in three pieces", 6, 33, 1),
    ("pageable", 12, 16, 1),
    ("pageable", 0, 40, 3),
    ("mapped", 12, 33, 1),
    ("mapped", 1, 16, 16),
    ("held for a layer", 12, 16, 1),
    ("held for a layer", 6, 33, 2),
    ("held for a layer", 0, 70, 1),
)


@pytest.mark.parametrize(("source", "cache", "size", "wave"), DEPTHS)
def test_no_depth_changes_a_bit(lab, tiny_file, expected, monkeypatch, source, cache, size, wave):
    assert source in SOURCES
    monkeypatch.setattr(prompt_room, "WAVE", wave)
    bound = Bound(lab, tiny_file(), size, source, expert_cache=cache)
    assert answer(bound.executor, size) == expected
    assert all(same for _, same in bound.slots())
    assert getattr(bound.source, "held", []) == []
    bound.close()


def test_experts_in_other_memory_are_gathered_by_several_threads(
    lab, tiny_file, expected, monkeypatch
):
    monkeypatch.setattr(stager, "ALONE", 1)
    for source in ("pageable", "in three pieces"):
        bound = Bound(lab, tiny_file(), 33, source, expert_cache=6)
        assert answer(bound.executor, 33) == expected
        assert all(same for _, same in bound.slots())
        threads = [t for t in threading.enumerate() if t.name.startswith("strata-stager")]
        assert len(threads) == (stager.COPIERS - 1) * (source == "pageable")
        bound.close()
    assert not any(t.name.startswith("strata-stager") for t in threading.enumerate())


@given(
    parts=st.lists(st.integers(1, 5000), min_size=3, max_size=3),
    gap=st.integers(0, 300),
    count=st.integers(1, 7),
)
def test_jobs_of_copying_make_up_the_blob(parts, gap, count):
    offsets = [0, parts[0], parts[0] + parts[1]]
    layout = SimpleNamespace(
        nbytes=sum(parts),
        parts=[SimpleNamespace(offset=o, nbytes=n) for o, n in zip(offsets, parts, strict=True)],
    )
    starts = [o + n * gap for n, o in enumerate(offsets)]
    source = np.random.default_rng(7).integers(0, 256, starts[2] + parts[2], dtype=np.uint8)
    target = np.zeros(sum(parts), np.uint8)
    view = View(tuple(address_of(source) + at for at in starts), in_ram=True)
    jobs = stager._jobs(layout, view, address_of(target), count)
    assert 1 <= len(jobs) <= count
    assert max(sum(n for _, _, n in job) for job in jobs) <= -(-sum(parts) // count)
    for job in jobs:
        stager._move(job)
    wanted = [source[at : at + n] for at, n in zip(starts, parts, strict=True)]
    assert target.tobytes() == np.concatenate(wanted).tobytes()


def test_a_source_holds_two_waves_of_views_at_most(lab, tiny_file, expected, monkeypatch):
    """One is under way while the next is put on the stream; at a layer's end all are given back."""
    monkeypatch.setattr(prompt_room, "WAVE", 2)
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8)
    source, most = bound.source, []
    view, begin = source.view, source.begin_layer

    def viewing(expert):
        found = view(expert)
        most.append(len(source.held))
        return found

    def beginning(layer, experts):
        assert len(experts) == 1 or source.held == []
        begin(layer, experts)

    source.view, source.begin_layer = viewing, beginning
    prompts = bound.executor._prompts
    slot = bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:33], 0, slot))
    assert 2 < max(most) <= 4
    assert source.held == []
    assert len(prompts.borrowed.ring.parts) > 2
    source.view, source.begin_layer = view, begin
    bound.executor.close_sequence(slot)
    assert answer(bound.executor, 33) == expected
    bound.close()


@pytest.mark.parametrize("source", ["page-locked", "mapped", "held for a layer"])
def test_decoding_costs_after_a_prompt_what_it_did_before(bind, source):
    """The same launches, bytes, lanes and time by the accounting clock, round by round."""
    bound = bind(24, source)
    executor, runtime = bound.executor, bound.runtime
    slot = executor.open_sequence()

    def cost(rounds):
        """Of decoding some tokens from position 0 on, each round apart."""
        found = []
        for number in range(rounds):
            began, lanes = runtime.queues.now, executor.counters()
            streams = {n: s.as_dict() for n, s in runtime.account.streams.items()}
            window = chunk([int(IDS[number])], number, slot, [0], "window")
            logits = executor.run(window).tobytes()
            runtime.synchronize(bound.stream)
            after = {n: s.as_dict() for n, s in runtime.account.streams.items()}
            copied = {
                n: {way: nbytes - streams[n]["copied"].get(way, 0) for way, nbytes in s.items()}
                for n, s in ((name, each["copied"]) for name, each in after.items())
            }
            work = {
                n: [s[k] - streams[n][k] for k in ("launches", "graph_launches", "event_waits")]
                for n, s in after.items()
            }
            served = {
                lane: {k: v - lanes[lane][k] for k, v in counts.items()}
                for lane, counts in executor.counters().items()
            }
            took = runtime.queues.now - began
            found.append((logits, copied, work, served, pytest.approx(took, rel=1e-6)))
        return found

    cost(6)
    before = cost(6)
    other = executor.open_sequence()
    for start in (0, 32):
        executor.run(chunk(IDS[:32], start, other, [31] if start else []))
    first, *others = cost(6)
    assert first[0] == before[0][0], "what follows the prompt also waits for its lent slots"
    for was, now in zip(before[1:], others, strict=True):
        assert now[0] == was[0]
        assert {n: {w: b for w, b in c.items() if b} for n, c in now[1].items()} == {
            n: {w: b for w, b in c.items() if b} for n, c in was[1].items()
        }
        assert now[2:4] == was[2:4]
        assert now[4].expected == was[4]


def test_times_cost_nothing_while_they_are_off(bind):
    bound = bind(24)
    prompts, slot = bound.executor._prompts, bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:32], 0, slot))
    before = bound.runtime.calls()
    bound.executor.run(chunk(IDS[:32], 32, slot))
    plain = bound.runtime.calls()
    assert "create_timed_event" not in plain
    assert bound.executor.prompt_times() == []
    bound.executor.time_prompts(on=True)
    bound.executor.run(chunk(IDS[:32], 64, slot))
    on = Counter(bound.runtime.calls())
    assert on["record"] - plain["record"] > plain["record"] - before["record"]
    (found,) = bound.executor.prompt_times()
    assert (found["tokens"], found["start"]) == (32, 64)
    assert [each["layer"] for each in found["layers"]] == [*range(LAYERS), None]
    assert found["bytes"] == sum(each["copy"]["bytes"] for each in found["layers"])
    bound.executor.time_prompts(on=False)
    bound.executor.run(chunk(IDS[:32], 96, slot))
    off = Counter(bound.runtime.calls())
    assert off["record"] - on["record"] == plain["record"] - before["record"]
    assert off["destroy_event"] - on["destroy_event"] == on["create_timed_event"]
    assert prompts.chunk_times() == ()


def test_times_are_those_of_chunks_that_ended(bind):
    """A chunk that failed leaves no times, and the next one's are whole."""
    bound = bind(24)
    executor, prompts = bound.executor, bound.executor._prompts
    whole = timed(bound, 1)
    slot = executor.open_sequence()
    files, broken = bound.source.view, [5]

    def view(expert):
        if broken and len(broken) and expert.layer == broken[0]:
            raise KeyboardInterrupt
        return files(expert)

    bound.source.view = view
    with pytest.raises(KeyboardInterrupt):
        executor.run(chunk(IDS[:32], 0, slot))
    broken.clear()
    executor.run(chunk(IDS[:32], 0, slot))
    first, second = prompts.chunk_times()
    assert first == whole
    assert second.sums() == pytest.approx(whole.sums(), rel=0.05)


def test_a_runtime_without_timed_events_says_so(bind):
    bound = bind(24)

    class Plain:
        label = "DEV"

    bound.executor._prompts.runtime, kept = Plain(), bound.executor._prompts.runtime
    with pytest.raises(UsageError, match="DEV0 tells no times"):
        bound.executor.time_prompts(on=True)
    bound.executor._prompts.runtime = kept


def test_what_nobody_picked_is_copied_in_long_chunks_and_never_computed(bind):
    bound = bind(16)
    executor, prompts = bound.executor, bound.executor._prompts
    ids, answers = np.full(32, 7), []
    for _ in range(2):
        slot = executor.open_sequence()
        answers.append(executor.run(chunk(ids, 0, slot, [31])).tobytes())
        executor.close_sequence(slot)
        outside = [e for e in bound.source.places if e not in prompts.borrowed.slots]
        unpicked = [e for e in outside if not prompts.picked(e.layer)[e.index]]
        assert unpicked
        for expert in unpicked:  # not a number in every place
            bytes_at(bound.source.places[expert][0], bound.nbytes)[:] = 0xFF
    assert answers[0] == answers[1]
    assert prompts.counters()["prompt"]["experts"] == 2 * len(outside)
