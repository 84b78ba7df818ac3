"""Prompts in chunks: the CPU's bits at any chunk, cache and source; what is copied."""

import numpy as np
import pytest
from prompt_bench import EXPERTS, IDS, LAYERS, SOURCES, Bound, Stable, answer, chunk

from strata_core.cache.lend import lend
from strata_core.interfaces import Expert, Limits, Window
from strata_core.kernels.device.prompt_room import read_from_file
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import SimFaults


@pytest.mark.parametrize("cache", [0, 1, 8, 16])
@pytest.mark.parametrize("size", [16, 64, 512])
def test_any_chunk_and_cache_has_the_bits_of_the_cpu(lab, tiny_file, expected, size, cache):
    bound = Bound(lab, tiny_file(), size, expert_cache=cache)
    assert answer(bound.executor, size) == expected
    assert all(same for _, same in bound.slots())
    bound.close()


@pytest.mark.parametrize("cache", [0, 8])
@pytest.mark.parametrize("source", SOURCES)
def test_any_source_has_the_bits_of_the_cpu(lab, tiny_file, expected, source, cache):
    bound = Bound(lab, tiny_file(), 33, source, expert_cache=cache)
    for _ in range(2):
        assert answer(bound.executor, 33) == expected
        assert all(same for _, same in bound.slots())
    assert getattr(bound.source, "held", []) == []
    bound.close()


@pytest.mark.parametrize("kind", ["MXFP4"])
def test_helpers_and_other_types(lab, tiny_file, kind):
    checkpoint = tiny_file({"dense_layers": frozenset({0}), "layers": 3}, expert_type=kind)
    options = {"expert_cache": 5, "expert_cache_device1": 4}
    bound = Bound(lab, checkpoint, 24, "mapped", **options)
    whole = bound.executor.run(chunk(IDS[:24], slot=bound.executor.open_sequence(), rows=range(16)))
    limits = Limits(tokens=24, logits=24, context=600, kv_type="fp16")
    assert whole.tobytes() == lab.cpu(checkpoint, limits, IDS[:24])[:16].tobytes()
    bound.close()


def test_every_expert_outside_is_copied_once_a_chunk(lab, tiny_file):
    """Long chunks bring all experts that no slot holds, short ones those that were picked."""
    bound = Bound(lab, tiny_file(), 64, expert_cache=8)
    lent = len(
        lend(
            bound.executor._prompts.borrowed.pool, bound.executor._prompts.borrowed.largest
        ).experts
    )
    outside = EXPERTS * LAYERS - 8 + lent
    slot = bound.executor.open_sequence()
    for number, start in enumerate((0, 32), 1):
        bound.executor.run(chunk(IDS[:32], start, slot))
        assert bound.copied() == number * outside
    before = bound.copied()
    bound.executor.run(chunk(IDS[:1], 64, slot, [0]))
    prompts = bound.executor._prompts
    picked = [i for layer in range(LAYERS) for i in np.flatnonzero(prompts.picked(layer))]
    assert bound.copied() - before <= len(picked) + lent
    counters = bound.executor.counters()
    assert counters["prompt"]["experts"] == bound.copied() - lent
    assert counters["refill"] == {"experts": lent, "bytes": lent * bound.nbytes}
    bound.close()


def test_a_long_chunk_waits_on_the_host_for_its_end_alone(lab, tiny_file):
    """No stream is emptied on the way; copies and kernels are ordered by events."""
    bound = Bound(lab, tiny_file(), 64, expert_cache=8)
    slot = bound.executor.open_sequence()
    bound.executor.run(chunk(IDS[:32], 0, slot))
    account = bound.runtime.account
    before = account.polls, {n: (s.synchronizes, s.event_waits) for n, s in account.streams.items()}
    bound.executor.run(chunk(IDS[32:64], 32, slot))
    assert account.polls - before[0] <= 2
    waits = 0
    for name, was in before[1].items():
        stream = account.streams[name]
        assert stream.synchronizes == was[0]
        waits += stream.event_waits - was[1]
    waves = sum(
        w.part is not None for each in bound.executor._prompts._waves.values() for w in each
    )
    assert waits == 2 * waves > 0
    bound.close()


def test_decoding_finds_its_experts_where_they_were(lab, tiny_file):
    bound = Bound(lab, tiny_file(), 64, expert_cache=16 - 1)
    slot = bound.executor.open_sequence()
    before = dict(bound.backend._placements[0].pool.places)
    bound.executor.run(chunk(IDS[:40], 0, slot))
    assert not all(same for _, same in bound.slots()), "a slot was lent"
    bound.executor.run(chunk([7], 40, slot, [0], "window"))
    assert all(same for _, same in bound.slots())
    assert bound.backend._placements[0].pool.places == before
    bound.close()


@pytest.mark.parametrize("source", ["page-locked", "mapped", "held for a layer"])
def test_prompts_between_rounds_that_experts_change_places_in(lab, tiny_file, expected, source):
    bound = Bound(lab, tiny_file(), 33, source, expert_cache=8, adapt_every=1, adapt_swaps=2)
    before = set(bound.backend._placements[0].pool.places)
    for _ in range(3):
        assert answer(bound.executor, 33, more=5) == expected
        assert all(same for _, same in bound.slots())
    assert set(bound.backend._placements[0].pool.places) != before, "some changed places"
    picked = sum(int(row.sum()) for row in bound.executor.picks().values())
    assert picked == 3 * (len(IDS) + 5) * LAYERS * 2
    bound.close()


def test_a_model_that_is_all_in_slots_lends_nothing(lab, tiny_file, expected):
    bound = Bound(lab, tiny_file(), 512, "mapped", expert_cache=16)
    assert answer(bound.executor, 512) == expected
    assert bound.copied() == 0
    assert bound.executor.counters()["hit"]["experts"] > 0
    bound.close()


def test_nothing_is_allocated_in_a_prompt(lab, tiny_file, expected):
    bound = Bound(lab, tiny_file(), 33, expert_cache=8)
    bound.executor.close_sequence(bound.executor.open_sequence())
    for verb in ("alloc", "host_alloc", "create_event", "create_stream"):
        bound.runtime.faults = SimFaults({verb: range(1 << 20)})
        slot = bound.executor.open_sequence()
        bound.executor.run(chunk(IDS[:33], 0, slot, [0]))
        bound.executor.close_sequence(slot)
    bound.runtime.faults = SimFaults({})
    assert answer(bound.executor, 33) == expected
    bound.close()


def test_windows_of_several_sequences_have_the_same_bits(lab, tiny_file):
    bound = Bound(lab, tiny_file(), 33, expert_cache=8)
    slots = [bound.executor.open_sequence() for _ in range(2)]
    parts = [chunk(IDS[:20], slot=slots[0]), chunk(IDS[:9], slot=slots[1])]
    both = Window(
        ids=np.concatenate([p.ids for p in parts]),
        positions=np.concatenate([p.positions for p in parts]),
        slots=np.concatenate([p.slots for p in parts]),
        logits_rows=np.array([28, 8], np.int32),
        kernel_class="prompt",
    )
    logits = bound.executor.run(both).copy()
    assert logits[0].tobytes() == logits[1].tobytes()
    bound.close()


def test_experts_of_helpers_that_are_read_from_the_file_are_told(tiny_file):
    files = tiny_file().experts
    memory, mapped = Stable(files), MappedFile(files)
    helped, outside = Expert(0, 3), Expert(1, 0)

    class Complement(Stable):
        def view(self, expert):
            return (mapped if expert == helped else super()).view(expert)

        def release(self, expert):
            if expert != helped:
                super().release(expert)

    told = read_from_file(Complement(files), {helped}, outside)
    assert told is not None
    assert "1 experts that helpers hold from the file" in told.what
    for source, held, other in (
        (memory, {helped}, outside),
        (mapped, {helped}, outside),
        (Complement(files), set(), outside),
        (Complement(files), {helped}, None),
    ):
        assert read_from_file(source, held, other) is None
    assert memory.held == []
