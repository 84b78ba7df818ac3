"""Three devices, a driver that pins little, two helpers: the order of the start decides.

Scaled down: contexts, small buffers and experts have the proportions of the real thing, in MiB.
"""

from __future__ import annotations

import pytest

from strata_core import api
from strata_core.errors import Refused
from strata_core.interfaces import StartPolicy

MIB = 1 << 20
LINE = "misc dxgk: create_existing_sysmem: establish_gpadl failed: -122"

# The model's experts are 10 MiB, the small buffers 2.2 MiB: the budget holds the contexts, the
# small buffers, and a part of the experts.
HARDWARE = {"context_pins": 4 * MIB, "refusal_line": LINE}
BUDGET = {"sim_pin_budget": 16 / 1024}
THREE = {
    "sim_devices": 3,
    "sim_vram": 0.5,
    "expert_cache": 30,
    "expert_cache_device1": 40,
    "expert_cache_device2": 50,
    "source": "arena",
}
WSL = {"wsl": 2}


def test_the_plain_order_fails_as_the_original_did_and_the_wsl_order_starts(
    run, wsl, ordered, caplog
) -> None:
    alone = run(sim_devices=1, sim_vram=0.5, expert_cache=30, source="arena")
    assert (alone.error, len(alone.tokens)) == (None, 12)

    # 1: the context of a further device, when it is selected for its helper cache
    context = run(hardware=HARDWARE, facts=WSL, **THREE, **BUDGET)
    assert isinstance(context.error, Refused)
    assert context.error.what.startswith("opening the context of SIM2 was refused: ")
    assert "out of memory (error 2)" in context.error.why
    assert "host memory that it can pin" in context.error.why
    assert "strata-wsl" in context.error.remedy

    # 2: a pinned allocation, where bulk memory was taken before the small buffers
    late = StartPolicy(small_pins_first=False)
    small = run(ordered(late), hardware=HARDWARE, facts=WSL, **THREE, **BUDGET)
    assert isinstance(small.error, Refused)
    assert small.error.what.startswith("taking the small page-locked buffers was refused: ")
    assert "out of memory (error 2)" in small.error.why or "the driver" in small.error.why
    assert "strata-wsl" in small.error.remedy

    # 3: contexts first, small buffers next, bulk within what is left
    caplog.clear()
    with caplog.at_level("INFO", "strata"):
        started = run(wsl(MIB // 4), hardware=HARDWARE, facts=WSL, **THREE, **BUDGET)
    assert started.error is None
    assert started.tokens == alone.tokens
    assert started.counters["helper"]["experts"] > 0
    assert started.paths, "it says how host memory was had"
    assert all("page-locked" in path for path in started.paths)
    log = caplog.messages
    contexts = [line for line in log if "context ready" in line]
    assert contexts == [
        f"SIM{i} context ready, 0.50 GiB free before expert arena registration" for i in range(3)
    ]
    assert log.index(contexts[-1]) < next(i for i, s in enumerate(log) if "page-locking" in s)
    assert any(
        line.startswith("SIM2: 50 additional experts")
        and line.endswith("results return through pinned host rows")
        for line in log
    )

    for outcome in (alone, context, small, started):
        assert outcome.left() == []
    assert context.runtime.kernel_log[-1] == small.runtime.kernel_log[-1] == LINE


def test_the_same_at_full_size(run, wsl, caplog) -> None:
    """1 GiB that can be pinned, three devices of 16 GiB, contexts that take a third each."""
    full = {
        **THREE,
        "sim_vram": 16,
        "sim_pin_budget": 1,
        "hardware": {"context_pins": 338 * MIB, "refusal_line": LINE},
        "facts": WSL,
    }
    plain = run(**full, tokens=2)
    assert isinstance(plain.error, Refused)
    assert plain.error.what.startswith("opening the context of SIM2 was refused: ")
    caplog.clear()
    with caplog.at_level("INFO", "strata"):
        started = run(wsl(8 * MIB), **full, tokens=2)
    assert (started.error, len(started.tokens)) == (None, 2)
    wanted = "SIM1 context ready, 16.00 GiB free before expert arena registration"
    assert wanted in caplog.messages
    assert (plain.left(), started.left()) == ([], [])


@pytest.mark.parametrize(
    ("early", "kind", "starts"), [(True, "plain", True), (False, "wsl", False), (None, "wsl", True)]
)
def test_the_variable_overrides_the_policy(early, kind, starts, run, wsl) -> None:
    allocator = wsl(MIB // 4) if kind == "wsl" else None
    outcome = run(
        allocator, hardware=HARDWARE, facts=WSL, early_remote_contexts=early, **THREE, **BUDGET
    )
    assert (outcome.error is None) == starts
    assert outcome.left() == []
    if not starts:
        assert "opening the context of SIM2 was refused" in outcome.error.what


def test_the_probe_is_remembered_and_can_be_overridden(run, wsl, tmp_path) -> None:
    asked = {**THREE, **BUDGET, "hardware": HARDWARE, "facts": WSL}
    first = run(wsl(MIB // 4), **asked)
    probes = first.runtime.calls()["host_alloc"]
    assert list((tmp_path / "cache").glob("pins-*.json"))
    again = run(wsl(MIB // 4), **asked)
    assert again.runtime.calls()["host_alloc"] < probes
    given = run(wsl(MIB // 4), pin_limit_gib=3 / 1024, **asked)
    assert given.runtime.calls()["host_alloc"] == again.runtime.calls()["host_alloc"]
    assert first.tokens == again.tokens == given.tokens != ()
    assert [outcome.left() for outcome in (first, again, given)] == [[], [], []]


def test_elsewhere_the_error_names_no_such_cause(run) -> None:
    outcome = run(hardware=HARDWARE, **THREE, **BUDGET)
    assert isinstance(outcome.error, Refused)
    assert "strata-wsl" not in outcome.error.remedy
    assert "out of memory (error 2)" in outcome.error.why


def test_doctor_knows_of_the_last_start_that_was_refused(run, wsl, tmp_path, make_machine) -> None:
    from strata_core.engine.start.diagnosis import diagnose, recall

    run(hardware=HARDWARE, facts=WSL, **THREE, **BUDGET)
    symptom = recall(tmp_path / "cache")
    assert symptom is not None
    assert symptom.doing == "opening the context of SIM2"
    found = diagnose(make_machine(observed={}, wsl=2), symptom)
    assert found is not None
    assert "out of memory" in found.why
    run(wsl(MIB // 4), hardware=HARDWARE, facts=WSL, **THREE, **BUDGET)
    assert recall(tmp_path / "cache") is None


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_goes_to_vram_where_it_cannot_be_pinned(tied, run, tiny, caplog) -> None:
    asked = {"model": tiny(tied), "sim_vram": 0.5, "expert_cache": 4, "hardware": HARDWARE}
    plenty = run(**asked)
    assert plenty.error is None
    # room for the context and the small buffers, and for nothing more
    planned = api.make_plan(asked["model"], backend="sim", sim_vram=0.5).plan
    items = next(tier.items for tier in planned.tiers if tier.name == "pinned")
    small = next(item.nbytes for item in items if item.what == "small buffers")
    assert ("token embedding" in [item.what for item in items]) == (not tied)
    least = HARDWARE["context_pins"] + small + 4096
    with caplog.at_level("INFO", "strata"):
        short = run(**asked, source="mmap", sim_pin_budget=least / 2**30)
    assert short.error is None
    assert short.tokens == plenty.tokens != ()
    lines = [line for line in caplog.messages if line.startswith("native embedding: cannot pin")]
    assert len(lines) == (0 if tied else 1)
    assert all(line.endswith("MiB, kept in VRAM instead") for line in lines)
    assert (plenty.left(), short.left()) == ([], [])
