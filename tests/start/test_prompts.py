"""Prompts through the public interface: one hash everywhere, within the plan, cancelled midway."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import strata_core
from strata_core import api
from strata_core.engine.messages import Cancel, Finished, PromptProgress, Submit
from strata_core.errors import StrataError, UsageError
from strata_core.testing.sim import SimFaults

IDS = tuple((np.arange(150) * 37 % 290 + 3).tolist())
VRAM = 0.012

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
