"""Prompts through the public interface: one hash everywhere, within the plan, cancelled midway."""

from __future__ import annotations

from collections import Counter
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import strata_core
from strata_core import api
from strata_core.engine.messages import Cancel, Finished, PromptProgress, Submit
from strata_core.errors import StrataError, UsageError
from strata_core.interfaces import Expert
from strata_core.kernels.device import prompt_room
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import SimFaults

IDS = tuple((np.arange(150) * 37 % 290 + 3).tolist())
VRAM = 0.012

TIER = {"source": "tiered-file", "ram_budget": 0.2608}  # of 192 experts some are kept
WAYS: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({"prefill": 16, "expert_cache": 0}, {}),
    ({"prefill": 64, "expert_cache": 1, "source": "arena"}, {"STRATA_ARENA_PIN_GIB": "0"}),
    ({"prefill": 512, "expert_cache": "auto", "source": "arena"}, {}),
    ({"prefill": 64, "expert_cache": 30, "source": "mmap"}, {}),
    (
        {"prefill": 33, "expert_cache": 12, "source": "sliced-pinned"},
        {"STRATA_COMPLEMENT_PIN_GIB": "all"},
    ),
    (
        {"prefill": 64, "expert_cache": 12, "source": "sliced-pinned"},
        {"STRATA_TEST_COMPLEMENT_REFUSE": "1"},
    ),
    (
        {"prefill": "auto", "expert_cache": 12, "source": "sliced-pinned"},
        {"STRATA_COMPLEMENT_PIN_GIB": "0"},
    ),
    ({"prefill": 64, "exact_prompt": True, "expert_cache": 12}, {}),
)

DEPTHS: tuple[tuple[int, dict[str, Any], dict[str, str]], ...] = (
    (2, {"prefill": 48, "expert_cache": 12, **TIER}, {}),
    (1, {"prefill": 33, "expert_cache": 60, **TIER}, {}),
    (3, {"prefill": 64, "expert_cache": 0, "source": "mmap"}, {}),
    (
        1,
        {"prefill": 64, "expert_cache": 40, "source": "sliced-pinned"},
        {"STRATA_COMPLEMENT_PIN_GIB": "0"},
    ),
    (
        2,
        {"prefill": 33, "expert_cache": 40, "source": "sliced-pinned"},
        {"STRATA_TEST_COMPLEMENT_REFUSE": "1", "STRATA_TIER_VERIFY": "1"},
    ),
)
"""Experts of a wave, with ways of placing the model."""


def answer(**options: Any) -> tuple[str, tuple[int, ...], Any]:
    with strata_core.load("demo", **options) as model:
        *_, done = model.generate(list(IDS), max_tokens=6, temperature=0.0, ignore_eos=True)
        backend = model._running.backend
        ledger = getattr(backend, "ledger", None)
        peak = backend.runtime.account.vram[0].peak if ledger is not None else 0
        return done.first_logits_sha256, done.token_ids, (model.plan, ledger, peak)


@pytest.fixture(scope="module")
def expected() -> tuple[str, tuple[int, ...]]:
    return answer(backend="cpu")[:2]


@pytest.mark.parametrize(("options", "variables"), WAYS)
def test_prompts_have_one_hash_within_the_plan(expected, options, variables, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    *found, (plan, ledger, peak) = answer(backend="sim", sim_vram=VRAM, **options)
    assert tuple(found) == expected
    assert peak <= ledger.peak("vram0") + (1 << 16), "rounding of what the driver gives"
    (tier,) = (tier for tier in plan.tiers if tier.name == "vram0")
    assert peak <= tier.need + (1 << 16)
    assert any(item.what.startswith("a prompt's chunk of ") for item in tier.items)


@pytest.mark.parametrize(("wave", "options", "variables"), DEPTHS)
def test_prompts_have_one_hash_however_far_ahead_copies_are(
    expected, wave, options, variables, monkeypatch
) -> None:
    monkeypatch.setattr(prompt_room, "WAVE", wave)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    *found, (plan, ledger, peak) = answer(backend="sim", sim_vram=VRAM, **options)
    assert tuple(found) == expected
    assert plan.source == options["source"]
    assert peak <= ledger.peak("vram0") + (1 << 16)


@pytest.mark.parametrize(("pins", "every"), [("all", 0), ("all", 1), ("0", 1)])
def test_a_resident_model_reads_no_file_for_slots_that_prompts_borrow(
    expected, pins, every, monkeypatch
) -> None:
    """What is in a lent slot is kept in memory meanwhile, also after experts changed places."""
    monkeypatch.setenv("STRATA_COMPLEMENT_PIN_GIB", pins)
    reads: list[Expert] = []
    read_into = MappedFile.read_into

    def reading(mapped: MappedFile, expert: Expert, buffer: memoryview) -> int:
        reads.append(expert)
        return read_into(mapped, expert, buffer)

    options: dict[str, Any] = {"backend": "sim", "sim_vram": VRAM, "prefill": 64}
    options |= {"expert_cache": 40, "source": "sliced-pinned", "adapt_every": every}
    with strata_core.load("demo", **options) as model:
        source = model._running.source
        places = len(source._arena.places._sizes)
        planned = next(t for t in model.plan.tiers if t.name == "ram")
        kept = next(item.nbytes for item in planned.items if item.what == "experts")
        blob = model.checkpoint.experts.layouts[0].nbytes
        assert kept == pytest.approx(places * blob, rel=0.02)
        pool = model._running.executor._prompts.borrowed.pool
        monkeypatch.setattr(MappedFile, "read_into", reading)
        for _ in range(2):
            *_, done = model.generate(list(IDS), max_tokens=6, temperature=0.0, ignore_eos=True)
            assert (done.first_logits_sha256, done.token_ids) == expected
            assert reads == []
        moved = model.counters
        assert bool(moved.get("entered", {}).get("experts")) == bool(every)
        assert moved["refill"]["experts"] > 0
        if not every:
            assert set(source._arena.places.experts()).isdisjoint(pool.places)
            assert len(source._arena.places._free) == places - 192 + 40


def test_a_failure_while_slots_are_lent_gives_every_place_back(expected) -> None:
    """Wherever it comes: the next prompt is right, and the source has its empty places again."""
    options: dict[str, Any] = {"backend": "sim", "sim_vram": VRAM, "prefill": 64, "adapt_every": 0}
    options |= {"expert_cache": 40, "source": "sliced-pinned"}
    short = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    with strata_core.load("demo", **options) as model:
        runtime, places = model._running.backend.runtime, model._running.source._arena.places
        free, calls = len(places._free), runtime._calls
        began, moments = Counter(calls), []
        *_, done = model.generate(list(IDS), **short)
        wanted = done.first_logits_sha256, done.token_ids
        assert wanted == (expected[0], expected[1][:2])
        for verb, parts in (("copy", (1, 40, 400)), ("record", (1, 3)), ("finished", (1,))):
            moments += [(verb, nth) for nth in parts if nth < calls[verb] - began[verb]]
        assert len(moments) == 6
        for verb, nth in moments:
            runtime.faults = SimFaults({verb: calls[verb] + nth})
            with pytest.raises(StrataError, match=verb):
                list(model.generate(list(IDS), **short))
            runtime.faults = SimFaults({})
            *_, done = model.generate(list(IDS), **short)
            assert (done.first_logits_sha256, done.token_ids) == wanted
            assert len(places._free) == free
            pool = model._running.executor._prompts.borrowed.pool
            assert set(places.experts()).isdisjoint(pool.places)


def test_a_chunk_that_is_not_named_fits_the_device() -> None:
    chunks = []
    for vram in (0.008, 0.05, 8.0):
        plan = api.make_plan("demo", backend="sim", sim_vram=vram).plan
        (item,) = (i for t in plan.tiers for i in t.items if i.what.startswith("a prompt's chunk"))
        chunks.append(int(item.what.split()[-2]))
        assert item.nbytes <= vram * 2**30 / 16 or chunks[-1] == 16
    assert chunks == sorted(chunks)
    assert chunks[0] < chunks[-1]


def test_own_buffers_stand_in_the_plan_where_nothing_is_lent() -> None:
    def items(cache: int) -> dict[str, int]:
        plan = api.make_plan("demo", backend="sim", sim_vram=VRAM, expert_cache=cache).plan
        return {i.what: i.nbytes for t in plan.tiers if t.name == "vram0" for i in t.items}

    assert items(0)["experts of prompts on their way"] > 0
    assert "experts of prompts on their way" not in items(12)


def test_a_prompt_that_is_cancelled_leaves_the_next_one_right(expected) -> None:
    options = {"backend": "sim", "sim_vram": VRAM, "expert_cache": 12, "prefill": 16}
    with strata_core.load("demo", **options) as model:
        engine, events = model._running.engine, SimpleQueue()

        def receive(event: Any) -> None:
            if isinstance(event, PromptProgress) and event.done >= 32:
                engine.send(Cancel("long"), lambda _: None)
            events.put(event)

        engine.send(Submit(request="long", prompt=IDS, max_tokens=3), receive)
        while not isinstance(event := events.get(timeout=120), Finished):
            pass
        assert event.reason == "cancelled"
        *_, done = model.generate([5, 9, 3], max_tokens=2, ignore_eos=True)
        assert len(done.token_ids) == 2
        *_, done = model.generate(list(IDS), max_tokens=6, temperature=0.0, ignore_eos=True)
        assert (done.first_logits_sha256, done.token_ids) == expected


def test_a_device_error_in_a_prompt_ends_that_request_alone(expected) -> None:
    options = {"backend": "sim", "sim_vram": VRAM, "expert_cache": 12, "prefill": 64}
    with strata_core.load("demo", **options) as model:
        runtime = model._running.backend.runtime
        runtime.faults = SimFaults({"launch": runtime._calls["launch"] + 90})
        with pytest.raises(StrataError, match="launch failed"):
            list(model.generate(list(IDS), max_tokens=6))
        *_, done = model.generate(list(IDS), max_tokens=6, temperature=0.0, ignore_eos=True)
        assert (done.first_logits_sha256, done.token_ids) == expected


def test_every_position_can_be_asked_for() -> None:
    rows = []
    for options in ({"backend": "cpu"}, {"backend": "sim", "sim_vram": VRAM, "expert_cache": 12}):
        with strata_core.load("demo", **options) as model:
            rows.append(model.logits(list(IDS)).tobytes())
    assert rows[0] == rows[1]


@pytest.mark.parametrize("value", [0, -1, 1 << 20, "many"])
def test_a_chunk_that_cannot_be_is_refused(value) -> None:
    with pytest.raises(UsageError, match="prefill"):
        strata_core.load("demo", prefill=value)
