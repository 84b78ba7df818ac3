"""Prompts in chunks: the CPU's bits at any chunk, cache and source; what is copied; failures."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from strata_core.cache.lend import lend
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, Limits, View, Window
from strata_core.kernels.device.prompt_room import read_from_file
from strata_core.memory.address import address_of, bytes_at
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import SimFaults

IDS = (np.arange(70) * 37 % 290 + 3).astype(np.int32)
EXPERTS, LAYERS = 8, 2


class Copied:
    """Every expert in memory of its own: page-locked or not, with addresses that hold or not."""

    def __init__(self, experts, runtime=None, *, apart=False):
        self.experts, self.runtime = experts, runtime
        self.mapped, self.held, self.begun, self.places = MappedFile(experts), [], [], {}
        self.read_into = self.mapped.read_into
        for layer, layout in experts.layouts.items():
            for index in range(experts.count):
                expert, places = Expert(layer, index), []
                gap = 512 if apart else 0
                base = self._take(layout.nbytes + 3 * gap)
                for n, part in enumerate(layout.parts):
                    data = experts.mapped(expert)[n]
                    places.append(base + part.offset + n * gap)
                    bytes_at(places[-1], part.nbytes)[:] = data
                self.places[expert] = tuple(places)

    def _take(self, nbytes):
        if self.runtime is not None:
            return self.runtime.host_alloc(nbytes)
        self.kept = [*getattr(self, "kept", []), np.zeros(nbytes, np.uint8)]
        return address_of(self.kept[-1])

    def begin_layer(self, layer, experts):
        self.begun.append((layer, tuple(experts)))

    def view(self, expert):
        self.held.append(expert)
        return View(self.places[expert], in_ram=True, dma=self.runtime is not None)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        if self.runtime is not None:
            for places in self.places.values():
                self.runtime.host_free(places[0])


class Stable(Copied):
    """The same, and its addresses hold."""

    def addresses(self, layer):
        count = self.experts.count
        return np.array([self.places[Expert(layer, i)] for i in range(count)], np.uint64)


SOURCES = {
    "mapped": lambda experts, runtime: MappedFile(experts),
    "pageable": lambda experts, runtime: Stable(experts),
    "page-locked": Stable,
    "in three pieces": lambda experts, runtime: Stable(experts, runtime, apart=True),
    "held for a layer": Copied,
}


def chunk(ids, start=0, slot=0, rows=(), kind="prompt"):
    return Window(
        ids=np.asarray(ids, np.int32),
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        slots=np.full(len(ids), slot, np.int32),
        logits_rows=np.asarray(rows, np.int32),
        kernel_class=kind,
    )


def answer(executor, size, ids=IDS, more=5):
    """Logits behind a prompt in chunks of `size`, and of greedy tokens after it."""
    slot = executor.open_sequence()
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        rows = [len(piece) - 1] if start + size >= len(ids) else []
        logits = executor.run(chunk(piece, start, slot, rows))
    found = [logits[0].copy()]
    for number in range(more):
        token = int(found[-1].argmax())
        window = chunk([token], len(ids) + number, slot, [0], "window")
        found.append(executor.run(window)[0].copy())
    executor.close_sequence(slot)
    return hashlib.sha256(np.stack(found).astype("<f4").tobytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(library, tiny_file):
    """What the CPU answers, once."""
    from strata_core.kernels.cpu.executor import CpuExecutor
    from strata_core.kernels.cpu.pool import Pool
    from strata_core.model.build import build_program

    checkpoint = tiny_file()
    program, experts = build_program(checkpoint.hyper), checkpoint.experts
    pool = Pool(library.compiler, 1)
    try:
        limits = Limits(tokens=512, logits=8, context=600, kv_type="fp16")
        source = MappedFile(experts)
        executor = CpuExecutor(program, checkpoint, experts, source, limits, library, pool)
        return answer(executor, 512)
    finally:
        pool.close()


class Bound:
    """A model on a simulated device for prompts, and what was copied on the prompts' stream."""

    def __init__(self, lab, checkpoint, size, source="page-locked", **options):
        self.lab = lab
        self.runtime = lab.runtime()
        self.runtime.open_context(0)
        self.source = SOURCES[source](checkpoint.experts, self.runtime)
        self.backend = lab.backend(self.runtime, **options)
        limits = Limits(tokens=size, logits=16, context=600, kv_type="fp16")
        self.executor = lab.bind(self.backend, checkpoint, self.source, limits)
        self.nbytes = max(x.nbytes for x in checkpoint.experts.layouts.values())
        self.stream = self.executor._prompts.stager.stream

    def copied(self):
        """Bytes on the prompts' stream so far, in blobs."""
        self.runtime.synchronize(self.stream)
        name = self.runtime.queues.streams[self.stream].name
        nbytes = self.runtime.account.streams[name].copied["host_to_device"]
        assert nbytes % self.nbytes == 0
        return nbytes // self.nbytes

    def slots(self):
        """Each slot's bytes against the file's."""
        pool = self.backend._placements[0].pool
        self.runtime.synchronize(self.stream)
        for expert, address in pool.places.items():
            for part, data in zip(
                self.executor._model.layouts[expert.layer].parts,
                self.executor._files.mapped(expert),
                strict=True,
            ):
                yield expert, (bytes_at(address + part.offset, part.nbytes) == data).all()

    def close(self):
        self.executor.close()
        self.source.close()
        self.lab.check_closed(self.backend)


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
    lent = len(lend(bound.executor._prompts.pool, bound.executor._prompts.largest).experts)
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
        w.half is not None for each in bound.executor._prompts._waves.values() for w in each
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


ERRORS = [StrataError("it cannot be read", "the disk is gone", "mend it"), ZeroDivisionError("oh")]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("cache", [8, 15])
@pytest.mark.parametrize("source", ["mapped", "page-locked", "held for a layer"])
def test_lent_experts_that_cannot_come_back_are_misses_like_any_other(
    lab, tiny_file, expected, source, cache, every, error
):
    """Also where rounds had no other lane for its layer, since all of it was in slots."""
    bound = Bound(lab, tiny_file(), 70, source, expert_cache=cache, adapt_every=every)
    assert answer(bound.executor, 70) == expected
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    inside = Counter(expert.layer for expert in pool.places)
    lent = lend(pool, prompts.largest).experts
    (fullest, most), *_ = inside.most_common()
    assert (most == EXPERTS) == (cache == 15)
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
    bound.close()


@pytest.mark.parametrize("every", [0, 1])
def test_where_no_lent_expert_comes_back_prompts_have_their_buffers_still(
    lab, tiny_file, expected, every
):
    bound = Bound(lab, tiny_file(), 33, "mapped", expert_cache=6, adapt_every=every)
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    loan = lend(pool, prompts.largest)
    fail_second_views(bound, set(loan.experts), ERRORS[0])
    slot = bound.executor.open_sequence()
    for start in (0, 33):
        bound.executor.run(chunk(IDS[:33], start, slot, [32]))
    bound.executor.close_sequence(slot)
    assert not set(loan.experts) & set(pool.places)
    for _ in range(2):
        assert answer(bound.executor, 33) == expected
        assert all(same for _, same in bound.slots())
    assert set(lend(pool, prompts.largest, prompts.lost.vacated).buffers) >= set(loan.buffers)
    assert len(lab.degradations) == 1, "the others are alike"
    bound.close()


def test_only_who_asks_for_an_expert_that_cannot_be_read_fails(lab, tiny_file):
    healthy = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8, adapt_every=0)
    bound = Bound(lab, tiny_file(), 33, "held for a layer", expert_cache=8, adapt_every=0)
    pool, prompts = bound.backend._placements[0].pool, bound.executor._prompts
    victim = lend(pool, prompts.largest).experts[-1]
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
    outside = [e for e in outside if e not in prompts._slots]
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
