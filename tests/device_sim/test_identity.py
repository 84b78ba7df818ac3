"""Logits on simulated devices have the bits of the CPU backend, wherever the experts lie."""

import hashlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.cache.rank import ranking
from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import Limits, View, Window
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "MXFP4", "F16", "BF16", "F32"]


class Paused:
    """A source without stable addresses: every expert is acquired and released."""

    def __init__(self, experts):
        self.source, self.held, self.begun = MappedFile(experts), [], []
        self.read_into = self.source.read_into

    def begin_layer(self, layer, experts):
        self.begun.append((layer, list(experts)))

    def view(self, expert):
        self.held.append(expert)
        found = self.source.view(expert)
        return View(found.parts, in_ram=True, stable=False)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        pass


@pytest.fixture(scope="module")
def expected(library, tiny_file):
    """expected(checkpoint, **more): what the CPU backend computes, once for each."""
    made = {}

    def find(lab, checkpoint, limits=None):
        key = (id(checkpoint), limits)
        if key not in made:
            made[key] = lab.cpu(checkpoint, **({"limits": limits} if limits else {}))
        return made[key]

    return find


def same(logits, expected):
    assert np.isfinite(logits).all()
    digests = [hashlib.sha256(x.astype("<f4").tobytes()).hexdigest() for x in (logits, expected)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("size", [None, 1, 3, 8])
@pytest.mark.parametrize("cache", [0, 1, 8, 16])
def test_any_cache_and_window_has_the_bits_of_the_cpu(lab, tiny_file, expected, cache, size):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=cache)
    executor = lab.bind(backend, checkpoint)
    same(lab.logits(executor, size=size), expected(lab, checkpoint))
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(lab, tiny_file, expected, kind):
    checkpoint = tiny_file(dense_type=kind, expert_type=kind)
    backend = lab.backend(expert_cache=7)
    executor = lab.bind(backend, checkpoint)
    same(lab.logits(executor, size=5), expected(lab, checkpoint))
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("kv_type", ["fp32", "int8"])
def test_kv_types(lab, tiny_file, expected, kv_type):
    limits = Limits(tokens=40, logits=40, context=600, kv_type=kv_type)
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=16)
    executor = lab.bind(backend, checkpoint, limits=limits)
    same(lab.logits(executor, size=4), expected(lab, checkpoint, limits))
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("where", ["device", "pinned"])
def test_the_embedding_may_lie_anywhere(lab, tiny_file, tools, expected, tied, where):
    checkpoint = tiny_file({"tied": tied})
    backend = lab.backend(expert_cache=3)
    backend.open_contexts()
    program = build_program(checkpoint.hyper)
    placement = backend.prepare(
        program, checkpoint, checkpoint.experts, tools.limits, tools.quiet()
    )
    placement.place_embedding(where)
    before = {c.purpose for c in backend.ledger.outstanding("pinned")}
    assert ("the token embedding" in before) == (where == "pinned" and not tied)
    executor = lab.bind(backend, checkpoint)
    same(lab.logits(executor), expected(lab, checkpoint))
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("aliases", ["same", "apart"])
@pytest.mark.parametrize("helpers", [(4,), (0, 4), (3, 4), (2, 3, 99)])
def test_helpers(lab, tiny_file, expected, helpers, aliases):
    checkpoint = tiny_file()
    runtime = lab.runtime(vram=(1 << 30,) * 4, aliases=aliases)
    asked = {f"expert_cache_device{n}": count for n, count in enumerate(helpers, 1)}
    backend = lab.backend(runtime, expert_cache=2, **asked)
    executor = lab.bind(backend, checkpoint)
    for size in (1, 7):
        same(lab.logits(executor, size=size), expected(lab, checkpoint))
    counters = executor.counters()
    assert counters["helper"]["experts"] > 0
    assert (counters["cpu"]["experts"] == 0) == (sum(helpers) >= 14)
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_source_without_stable_addresses(lab, tiny_file, expected, threads):
    checkpoint = tiny_file()
    source = Paused(checkpoint.experts)
    backend = lab.backend(expert_cache=5, threads=threads)
    executor = lab.bind(backend, checkpoint, source)
    for size in (1, 6):
        same(lab.logits(executor, size=size), expected(lab, checkpoint))
    assert source.held == []
    assert {layer for layer, _ in source.begun} == set(checkpoint.experts.layouts)
    lab.check_closed(backend, executor)


def test_windows_of_more_tokens_than_the_kernels_take(lab, tiny_file, expected):
    checkpoint = tiny_file()
    for most in (1, 3, 40):
        backend = lab.backend(expert_cache=5, most_tokens=most)
        executor = lab.bind(backend, checkpoint)
        same(lab.logits(executor), expected(lab, checkpoint))
        lab.check_closed(backend, executor)


def test_long_contexts_have_more_splits(lab, tiny_file, tools):
    checkpoint = tiny_file()
    ids = (np.arange(530) * 31 % 290 + 3).astype(np.int32)
    limits = Limits(tokens=300, logits=300, context=600, kv_type="fp16")
    wanted = lab.cpu(checkpoint, limits, ids[:300])
    backend = lab.backend(expert_cache=16)
    executor = lab.bind(backend, checkpoint, limits=limits)
    same(lab.logits(executor, ids[:300]), wanted)
    assert {splits for _, _, splits, _ in executor._rounds} == {1, 2}
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("window", [3, 100, 300])
def test_sliding_windows_of_attention(lab, tiny_file, window):
    checkpoint = tiny_file()
    hyper = evolve(checkpoint.hyper, sliding_window=window)
    ids = (np.arange(530) * 31 % 290 + 3).astype(np.int32)
    limits = Limits(tokens=530, logits=530, context=600, kv_type="fp16")
    wanted = lab.cpu(checkpoint, limits, ids, hyper)
    backend = lab.backend(expert_cache=16)
    executor = lab.bind(backend, checkpoint, limits=limits, hyper=hyper)
    same(lab.logits(executor, ids), wanted)
    lab.check_closed(backend, executor)


def test_layers_without_experts_between(lab, tiny_file, expected):
    checkpoint = tiny_file({"layers": 4, "dense_layers": frozenset({0, 2})})
    backend = lab.backend(expert_cache=3, expert_cache_device1=4)
    executor = lab.bind(backend, checkpoint)
    same(lab.logits(executor, size=3), expected(lab, checkpoint))
    lab.check_closed(backend, executor)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_experts_may_lie_anywhere_at_all(lab, tiny_file, tools, expected, data):
    checkpoint = tiny_file({"layers": 3})
    layouts = checkpoint.experts.layouts
    sizes = {f"expert_cache_device{n}": data.draw(st.integers(0, 12)) for n in (1, 2)}
    backend = lab.backend(expert_cache=data.draw(st.integers(0, 24)), **sizes)
    backend.open_contexts()
    backend.prepare(
        build_program(checkpoint.hyper),
        checkpoint,
        checkpoint.experts,
        tools.limits,
        tools.quiet(),
        data.draw(st.permutations(ranking(None, layouts, checkpoint.experts.count))),
    )
    source = Paused(checkpoint.experts) if data.draw(st.booleans()) else None
    executor = lab.bind(backend, checkpoint, source)
    same(lab.logits(executor, size=data.draw(st.integers(1, 9))), expected(lab, checkpoint))
    lab.check_closed(backend, executor)


def test_several_sequences_and_wanted_rows(lab, tiny_file, tools, expected):
    checkpoint, ids = tiny_file(), tools.ids
    logits = expected(lab, checkpoint)
    backend = lab.backend(expert_cache=5)
    executor = lab.bind(backend, checkpoint)
    slots = [executor.open_sequence() for _ in range(3)]
    for slot in slots[1:]:
        assert executor.run(tools.window(ids[:5], slot=slot, rows=[])).shape[0] == 0
    parts = [tools.window(ids[:8], slot=slots[0]), tools.window(ids[5:9], start=5, slot=slots[1])]
    parts.append(tools.window(ids[5:6], start=5, slot=slots[2]))
    joined = Window(
        ids=np.concatenate([p.ids for p in parts]),
        positions=np.concatenate([p.positions for p in parts]),
        slots=np.concatenate([p.slots for p in parts]),
        logits_rows=np.array([12, 3, 11, 3, 0], np.int32),
        kernel_class="window",
    )
    assert executor.run(joined).tobytes() == logits[[5, 3, 8, 3, 0]].tobytes()
    snapshot = executor.save(slots[0], 8)
    executor.run(tools.window([7, 8, 9], start=8, slot=slots[0]))
    executor.restore(slots[0], snapshot)
    again = executor.run(tools.window(ids[8:11], start=8, slot=slots[0], rows=[2]))
    assert again.tobytes() == logits[[10]].tobytes()
    for slot in slots:
        executor.close_sequence(slot)
    assert executor.open_sequence() == 0
    lab.check_closed(backend, executor)


@pytest.mark.shared
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"])
def test_families(lab, models: Path, expected, family):
    with closing(open_checkpoint(models / "tiny" / family)) as checkpoint:
        backend = lab.backend(expert_cache=5, expert_cache_device1=3)
        executor = lab.bind(backend, checkpoint)
        same(lab.logits(executor, size=5), lab.cpu(checkpoint))
        lab.check_closed(backend, executor)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["Q4_K_M", "MXFP4"])
@pytest.mark.parametrize("cache", [0, 96, 192])
def test_a_trained_model(lab, models: Path, name, cache):
    with closing(open_checkpoint(models / "kjv-moe" / f"kjv-{name}.gguf")) as checkpoint:
        backend = lab.backend(expert_cache=cache)
        executor = lab.bind(backend, checkpoint)
        same(lab.logits(executor, size=7), lab.cpu(checkpoint))
        lab.check_closed(backend, executor)
