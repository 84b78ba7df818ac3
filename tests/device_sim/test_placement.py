"""Putting a model on devices: what is said, what gives way, what is refused, in which order."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.cache.rank import ranking
from strata_core.errors import Refused, UsageError
from strata_core.interfaces import Expert
from strata_core.kernels.device.dense import lone_embedding
from strata_core.kernels.device.exchange import LINE, MOST_HELPERS, Exchange, Shape, word
from strata_core.kernels.device.layout import CELL, HELPER, HIT, HOST, LINK
from strata_core.kernels.device.options import read_options
from strata_core.memory.ledger import PINNED, vram
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import SimFaults
from strata_core.testing.sim.lanes import choose_lanes

MIB = 1 << 20


def placement(lab, backend, checkpoint, tools, ranking=None):
    backend.open_contexts()
    return backend.prepare(
        build_program(checkpoint.hyper),
        checkpoint,
        checkpoint.experts,
        tools.limits,
        tools.quiet(),
        ranking,
    )


def spread(experts):
    """All experts, evenly over the layers."""
    return list(ranking(None, experts.layouts, experts.count))


def test_a_refused_embedding_goes_to_the_device_and_is_told(lab, tiny_file, tools, caplog):
    checkpoint = tiny_file()
    # the exchange and the buffers come first; the third is the embedding
    backend = lab.backend(lab.runtime(faults=SimFaults({"host_alloc": 3})), expert_cache=2)
    placed = placement(lab, backend, checkpoint, tools)
    placed.take_small_pins()
    placed.place_dense()
    before = backend.ledger.used(vram(0)), backend.ledger.used(PINNED)
    with caplog.at_level(logging.INFO, "strata"):
        placed.place_embedding("pinned")
    assert "native embedding: cannot pin 0 MiB, kept in VRAM instead" in caplog.text
    after = backend.ledger.used(vram(0)), backend.ledger.used(PINNED)
    lone = lone_embedding(placed.order.program)
    table = checkpoint.raw(lone.role, lone.layer)[2].nbytes
    assert after[1] == before[1]
    assert after[0] - before[0] >= table
    executor = lab.bind(backend, checkpoint)
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)


def test_helpers_say_what_they_hold(lab, tiny_file, tools, caplog):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=1, expert_cache_device1=3, expert_cache_device2="auto")
    with caplog.at_level(logging.INFO, "strata"):
        executor = lab.bind(backend, checkpoint)
    lines = [r.getMessage() for r in caplog.records if "additional" in r.getMessage()]
    end = "results return through pinned host rows"
    assert lines[0] == f"SIM1: 3 additional experts, 0.00 GiB; {end}"
    assert lines[1].startswith("SIM2: 12 additional experts, ")
    lab.check_closed(backend, executor)


def test_caches_are_filled_by_rank_one_after_the_other(lab, tiny_file, tools):
    checkpoint = tiny_file()
    order = spread(checkpoint.experts)[::-1]
    backend = lab.backend(expert_cache=3, expert_cache_device1=2)
    placed = placement(lab, backend, checkpoint, tools, order)
    source = MappedFile(checkpoint.experts)
    placed.make_cache()
    assert placed.resident == set(order[:3])
    placed.fill_cache(source)
    placed.fill_helpers(source)
    assert list(placed.pool.places) == order[:3]
    assert list(placed.helpers[0].pool.places) == order[3:5]
    assert placed.resident == set(order[:5])
    used = backend.ledger.used(vram(0))
    placed.fill_cache(source)
    placed.place_dense()
    assert backend.ledger.used(vram(0)) == used
    executor = lab.bind(backend, checkpoint, source)
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)


def test_without_a_profile_experts_are_spread_over_the_layers(lab, tiny_file, tools):
    checkpoint = tiny_file({"layers": 3})
    backend = lab.backend(expert_cache=4)
    placed = placement(lab, backend, checkpoint, tools)
    placed.make_cache()
    assert list(placed.pool.places) == [Expert(0, 0), Expert(1, 0), Expert(2, 0), Expert(0, 1)]
    backend.close()
    assert backend.ledger.outstanding() == ()


def test_a_number_that_does_not_fit_says_what_would(lab, tiny_file, tools):
    checkpoint = tiny_file({"experts": 64})
    backend = lab.backend(lab.runtime(vram=(8 * MIB,)), expert_cache=100)
    with pytest.raises(Refused) as caught:
        lab.bind(backend, checkpoint)
    assert caught.value.what.startswith("--expert-cache 100 does not fit: SIM0 has no ")
    words = caught.value.remedy.split()
    fits = int(words[2])
    assert 0 < fits < 100
    lab.check_closed(backend)
    backend = lab.backend(lab.runtime(vram=(8 * MIB,)), expert_cache=fits)
    lab.check_closed(backend, lab.bind(backend, checkpoint))


@pytest.mark.parametrize("gib", [0.003, 0.005])
def test_a_budget_caps_what_is_taken_of_the_device(lab, tiny_file, tools, gib):
    checkpoint = tiny_file({"experts": 64})
    backend = lab.backend(expert_cache="auto", vram_budget=gib)
    executor = lab.bind(backend, checkpoint)
    held = len(backend._placements[0].pool.places)
    assert 0 < held < 128
    ledger = backend.ledger
    assert gib * 2**30 - 2 * 2**17 < ledger.used(vram(0)) <= gib * 2**30
    assert backend.runtime.report()["vram"]["SIM0"]["peak"] <= gib * 2**30
    lab.check_closed(backend, executor)


def test_a_full_device_is_a_degradation(lab, tiny_file, tools):
    checkpoint = tiny_file({"experts": 64})
    backend = lab.backend(lab.runtime(vram=(9 * MIB,)), expert_cache="auto", vram_reserve_mib=0)
    executor = lab.bind(backend, checkpoint)
    assert [d.what for d in lab.degradations] == ["only 0 MiB of VRAM free on SIM0"]
    lab.check_closed(backend, executor)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"device": (1, 7)}, "--device 7: there is no such device"),
        ({"device": (2,), "expert_cache_device1": 3}, "--expert-cache-device1 3 has no device"),
        ({"expert_cache_device3": 3}, "--expert-cache-device3 3 has no device"),
    ],
)
def test_devices_that_are_not_there_are_named(lab, options, what):
    with pytest.raises(UsageError, match=what):
        lab.backend(**options)


def test_another_device_may_compute(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend(device=(2, 0), expert_cache=4, expert_cache_device1=4)
    executor = lab.bind(backend, checkpoint)
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    vram_of = backend.runtime.report()["vram"]
    assert vram_of["SIM2"]["in_use"] > vram_of["SIM0"]["in_use"] > 0
    assert vram_of["SIM1"]["in_use"] == 0
    lab.check_closed(backend, executor)


def test_a_second_model_may_be_bound_and_the_first_closed(lab, tiny_file, tools):
    one, two = tiny_file(), tiny_file(expert_type="Q8_0", dense_type="F16")
    backend = lab.backend(expert_cache=4)
    first, second = lab.bind(backend, one), lab.bind(backend, two)
    for executor, checkpoint in ((first, one), (second, two), (first, one)):
        assert lab.logits(executor, size=2).tobytes() == lab.cpu(checkpoint).tobytes()
    first.close()
    assert lab.logits(second).tobytes() == lab.cpu(two).tobytes()
    lab.check_closed(backend, second)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_lanes_are_chosen_by_the_table_s_rule(data):
    """Against the rule in its own words: one expert at a time, in order of first appearance."""
    experts = data.draw(st.integers(1, 9))
    cells = np.zeros(experts, CELL)
    kinds = data.draw(st.lists(st.integers(0, 7), min_size=experts, max_size=experts))
    for cell, kind in zip(cells, kinds, strict=True):
        cell["slot"] = 5 if kind & 1 else 0
        cell["helper"] = kind >> 1 & 1
        cell["alias"] = 9 if kind & 4 else 0
    picks = data.draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=20))
    share = data.draw(st.lists(st.integers(0, 9), min_size=21, max_size=21))
    lanes = choose_lanes(picks, cells, np.array(share, np.int32)).tolist()
    missed = {p for p in picks if kinds[p] & 3 == 0}
    over, decided = 0, {}
    for pick in picks:
        if pick in decided:
            continue
        if kinds[pick] & 1:
            decided[pick] = HIT
        elif kinds[pick] & 2:
            decided[pick] = HELPER
        elif kinds[pick] & 4 and over < share[len(missed)]:
            decided[pick], over = LINK, over + 1
        else:
            decided[pick] = HOST
    assert lanes == [decided[pick] for pick in picks]


@given(st.integers(0, 60))
def test_every_announcement_has_a_line_of_its_own(layers):
    shape = Shape(tokens=1, top_k=2, inputs=32, outputs=32, layers=layers, vocabulary=8, half=4)
    words = [word(shape, layer, h) for h in range(MOST_HELPERS + 1) for layer in range(layers)]
    words.append(word(shape, layers))
    assert len(set(words)) == len(words)
    assert all(w % LINE == 0 for w in words)
    assert max(words) + LINE <= Exchange.plan(shape).rest.size("words")


@pytest.mark.shared
def test_the_demo_runs_from_the_record(models: Path, tools):
    """The record `sim` as the command line builds it, without the lab."""
    from contextlib import closing

    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.interfaces import BackendContext
    from strata_core.testing.machines import recorded_pc
    from strata_core.testing.sim_backend import build

    options = {"sim_vram": 0.05, "sim_devices": 2, "threads": 1, "expert_cache_device1": 5}
    machine = recorded_pc({"module:llvmlite": True})
    context = BackendContext(machine=machine, options=options, degrade=print)
    backend = build(context)
    with closing(open_checkpoint(models / "kjv-moe" / "kjv-Q4_0.gguf")) as checkpoint:
        executor = backend.bind(
            build_program(checkpoint.hyper),
            checkpoint,
            checkpoint.experts,
            MappedFile(checkpoint.experts),
            tools.limits,
            tools.quiet(),
        )
        slot = executor.open_sequence()
        executor.run(tools.window(tools.ids[:9], slot=slot))
        assert executor.counters()["hit"]["experts"] > 0
        executor.close()
    backend.close()


@pytest.mark.parametrize(("asked", "kept"), [(None, None), (700, 700 << 20), (0, 0)])
def test_a_reserve_of_ones_own_is_kept_to_the_letter(lab, asked, kept):
    options = read_options({"vram_reserve_mib": asked}, lab.runtime().devices())
    assert options.cache.reserve == kept
