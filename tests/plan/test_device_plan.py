"""Plans for devices: what goes into VRAM, what is page-locked, what RAM keeps, what else fits."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.devices import Bulk, default_reserve
from strata_core.plan.explain import does_not_fit, explain, plan_degradations
from strata_core.plan.lending import lendable
from strata_core.plan.moving import Pace
from strata_core.plan.plan import Plan, Tier, make_plan

from .device_requests import MIB, SIZES, request


def tier(plan: Plan, name: str) -> Tier:
    return next(item for item in plan.tiers if item.name == name)


def held(plan: Plan, name: str) -> dict[str, int]:
    return {item.what: item.nbytes // MIB for item in tier(plan, name).items}


def test_what_is_left_of_vram_holds_experts() -> None:
    plan = make_plan(request(1000))
    # 300 dense less the embedding, 256 of keys and values, 20 of work; an expert is 2 MiB
    assert (plan.context, plan.context_because) == (1024, "the trained length")
    assert held(plan, "vram0") == {
        "dense weights": 200,
        "keys and values of 1024 tokens": 256,
        "working memory": 20,
        "262 of 1000 experts": 524,
    }
    assert held(plan, "ram") == {
        "experts": 2000,
        "token embedding": 100,
        "small page-locked buffers": 10,
        "program": 256,
    }
    assert held(plan, "pinned") == {
        "small buffers": 10,
        "token embedding": 100,
        "100 % of the experts in RAM (path 2, in slices)": 2000,
    }
    assert plan.fits
    (cache,) = plan.as_json()["caches"]
    assert cache == {"device": "DEV0", "experts": 262, "nbytes": 524 * MIB, "spare": 0}
    assert "vram0 (DEV0): need 1000.0 MiB, have 1000.0 MiB (of 1000.0 MiB;" in explain(plan)


@pytest.mark.parametrize(
    ("pins", "embedding", "bulk"),
    [
        (None, True, "100 % of the experts in RAM (path 2, in slices)"),
        (3000, True, "100 % of the experts in RAM (path 2, in slices)"),
        (1000, True, "44 % of the experts in RAM (path 2, in slices)"),
        (110, True, "0 % of the experts in RAM (path 3, locked at most)"),
        (50, False, "2 % of the experts in RAM (path 2, in slices)"),
        (10, False, "0 % of the experts in RAM (path 3, locked at most)"),
    ],
)
def test_the_pin_limit_decides_embedding_and_path(pins, embedding, bulk) -> None:
    plan = make_plan(request(1000, pins=None if pins is None else pins * MIB))
    assert bulk in held(plan, "pinned")
    assert ("token embedding" in held(plan, "pinned")) == embedding
    assert held(plan, "vram0")["dense weights"] == (200 if embedding else 300)
    assert plan.fits


def test_settings_bound_what_is_pinned_of_each_source() -> None:
    caps = {"arena": Bulk(most=500 * MIB), "sliced-pinned": Bulk(most=0)}
    arena = make_plan(request(1000, bulk=caps, more={"source": "arena"}))
    assert held(arena, "pinned")["25 % of the experts in RAM (path 2, in slices)"] == 500
    resident = make_plan(request(1000, bulk=caps, more={"source": "sliced-pinned"}))
    assert "0 % of the experts in RAM (path 3, locked at most)" in held(resident, "pinned")


def test_small_buffers_that_cannot_be_pinned_do_not_fit() -> None:
    plan = make_plan(request(1000, pins=9 * MIB))
    assert tier(plan, "pinned").short_by == MIB
    assert does_not_fit(plan, "m").what == "m does not fit: pinned is short by 1.0 MiB"


def test_the_resident_complement_is_what_no_device_holds() -> None:
    plan = make_plan(request(1000, 508, helpers=(None,), more={"source": "sliced-pinned"}))
    assert [cache.experts for cache in plan.caches] == [262, 250]
    assert held(plan, "vram1") == {"250 of 1000 experts": 500, "working memory": 8}
    assert held(plan, "ram")["experts"] == 2000 - 524 - 500
    assert tier(plan, "file").items == ()
    less = make_plan(request(1000, resident=100 * MIB, more={"source": "sliced-pinned"}))
    assert held(less, "ram")["experts"] == 100
    assert held(less, "file") == {"experts": 2000 - 524 - 100}


@pytest.mark.parametrize(
    ("ram", "source"), [(2366, "arena"), (2365, "sliced-pinned"), (1200, "mmap")]
)
def test_the_ladder_of_sources(ram: int, source: str) -> None:
    plan = make_plan(request(1000, more={"ram": ram * MIB}))
    assert (plan.source, plan.fits) == (source, True)


def test_copies_for_prompts_take_what_is_left_and_push_no_source_aside() -> None:
    layered = evolve(SIZES, layers=10)
    bare = make_plan(request(1000, more={"ram": 2000 * MIB, "source": "sliced-pinned"}))
    needed, outside = tier(bare, "ram").need, held(bare, "ram")["experts"]
    assert bare.expert_room == 2000 * MIB - needed + outside * MIB
    whole = 2 * lendable(262, 1000, 10)
    for more, copies in ((0, 0), (100, 100), (whole, whole), (whole + 200, whole)):
        ram = needed + more * MIB
        plan = make_plan(request(1000, more={"ram": ram, "sizes": layered}))
        assert (plan.source, plan.fits) == ("sliced-pinned", True)
        assert held(plan, "ram")["experts"] == outside + copies
        assert plan.expert_room == (outside + more) * MIB


def test_the_context_gets_half_of_what_caches_leave() -> None:
    plan = make_plan(request(520, more={"trained": 4096}))
    # half of 520 MiB less 220, four tokens a MiB; an expert is 2 MiB
    assert (plan.context, plan.caches[0].experts) == (600, 75)
    assert plan.context_because.startswith("what fits in half of what is left of DEV0;")


@pytest.mark.parametrize(
    ("cache", "context", "because"),
    [
        (None, 1560, "what fits in half of what is left of DEV0; the rest holds experts"),
        (100, 2320, "what fits in what is left of DEV0"),
    ],
)
def test_the_context_is_cut_to_vram_and_says_so(cache, context, because) -> None:
    wanted = request(1000, cache=cache, more={"trained": 4096})
    plan = make_plan(wanted)
    assert plan.context == context
    assert plan.context_because == f"{because}; the model was trained on 4096"
    (cut,) = plan_degradations(wanted, plan)
    assert "--max-context" in cut.remedy
    assert "RAM_RESERVE" not in cut.remedy


@pytest.mark.parametrize("cache", [None, 100])
def test_a_chunk_that_takes_room_from_the_context_is_named_with_its_bytes(cache) -> None:
    sizes = evolve(SIZES, chunk=2048, prompt=400 * MIB)
    wanted = request(1000, cache=cache, more={"trained": 4096, "sizes": sizes})
    without = make_plan(request(1000, cache=cache, more={"trained": 4096}))
    plan = make_plan(wanted)
    assert plan.context == without.context - (1600 if cache else 800)
    assert " beside chunks of 2048 tokens, which take 400.0 MiB;" in plan.context_because
    (cut,) = plan_degradations(wanted, plan)
    assert cut.why == plan.context_because
    assert "--prefill" in cut.remedy
    # nothing is said of it where the context is whole
    whole = request(4000, more={"sizes": sizes})
    assert make_plan(whole).context_because == "the trained length"
    assert plan_degradations(whole, make_plan(whole)) == ()


def test_the_reserve_is_left_by_choices_and_taken_by_what_was_named() -> None:
    auto = make_plan(request(1000, reserve=300 * MIB))
    assert tier(auto, "vram0").need == 700 * MIB
    named = make_plan(request(1000, reserve=300 * MIB, cache=262, more={"context": 1024}))
    assert (tier(named, "vram0").need, named.fits) == (1000 * MIB, True)
    budget = make_plan(request(2000, budget=600 * MIB, reserve=300 * MIB))
    assert (tier(budget, "vram0").need, tier(budget, "vram0").have) == (600 * MIB, 600 * MIB)
    assert "--vram-budget 600.0 MiB" in explain(budget)


def test_the_default_reserve_leaves_small_devices_usable() -> None:
    assert default_reserve(24 << 30) == 700 * MIB
    assert default_reserve(800 * MIB) == 40 * MIB


def test_a_helper_with_fewer_experts_than_asked_is_reported() -> None:
    wanted = request(9000, 1000, helpers=(5000, 0, 0), cache=900)
    plan = make_plan(wanted)
    assert [cache.experts for cache in plan.caches] == [900, 100]
    (fewer,) = plan_degradations(wanted, plan)
    assert fewer.what == "--expert-cache-device1 5000 holds 100 experts"
    exact = request(9000, 1000, helpers=(100, 0, 0), cache=900)
    assert plan_degradations(exact, make_plan(exact)) == ()


def test_a_helper_without_experts_is_reported() -> None:
    wanted = request(9000, 1000, helpers=(None, 0, 0))
    plan = make_plan(wanted)
    assert [cache.experts for cache in plan.caches] == [1000, 0]
    (idle,) = plan_degradations(wanted, plan)
    assert idle.what == "DEV1 holds no experts, though --expert-cache-device1 asks"


@pytest.mark.parametrize(
    ("asked", "context", "flags"),
    [
        ({"cache": 500}, 1024, ["--expert-cache 262"]),
        ({"cache": 300}, 4000, ["--max-context 720", "--expert-cache 0 --max-context 3120"]),
        ({}, 4000, ["--max-context 3120"]),
    ],
)
def test_what_else_would_fit_is_named_and_fits(asked, context, flags) -> None:
    plan = make_plan(request(1000, **asked, more={"context": context}))
    assert not plan.fits
    assert [option.flags for option in plan.options] == flags
    assert all(option.need <= 1000 * MIB for option in plan.options)
    assert "short by" in does_not_fit(plan, "m").what
    assert flags[0] in does_not_fit(plan, "m").remedy


def test_nothing_fits_a_device_smaller_than_the_dense_weights() -> None:
    plan = make_plan(request(100))
    assert (plan.fits, plan.options) == (False, ())
    assert "vram0 (DEV0) is short by" in does_not_fit(plan, "m").what


def test_a_device_whose_memory_is_not_known_is_promised_nothing() -> None:
    plan = make_plan(request(0, 0, helpers=(None,), more={"trained": 4096}))
    assert (plan.fits, plan.context) == (True, 4096)
    assert [cache.experts for cache in plan.caches] == [0, 0]
    assert "its size is known once it is open" in explain(plan)
    named = make_plan(request(0, cache=10))
    assert named.caches[0].experts == 10
    budget = make_plan(request(0, budget=1000 * MIB))
    assert (budget.caches[0].experts, tier(budget, "vram0").have) == (262, 1000 * MIB)


@given(
    totals=st.lists(st.integers(1, 6000), min_size=1, max_size=4),
    cache=st.one_of(st.none(), st.integers(0, 2000)),
    helpers=st.lists(st.one_of(st.none(), st.integers(0, 2000)), max_size=3),
    pins=st.one_of(st.none(), st.integers(0, 5000)),
    reserve=st.integers(0, 1000),
    ram=st.integers(0, 6000),
    context=st.one_of(st.none(), st.integers(1, 9000)),
    source=st.sampled_from([None, "arena", "mmap", "sliced-pinned"]),
)
def test_every_device_plan_adds_up(
    totals, cache, helpers, pins, reserve, ram, context, source
) -> None:
    wanted = request(
        *totals,
        cache=cache,
        helpers=tuple(helpers),
        pins=None if pins is None else pins * MIB,
        reserve=reserve * MIB,
        more={"ram": ram * MIB, "context": context, "source": source},
    )
    plan = make_plan(wanted)
    counts = [item.experts for item in plan.caches]
    assert sum(counts) <= SIZES.count
    assert cache is None or counts[0] == min(cache, SIZES.count)
    for number, total in enumerate(totals):
        if (cache if number == 0 else (helpers + [0] * 4)[number - 1]) is None and counts[number]:
            need = tier(plan, f"vram{number}").need
            assert need <= max(0, total - reserve) * MIB + 1
    stored = sum(item.nbytes for t in plan.tiers if t.name in ("file", "ram")
                 for item in t.items if item.what == "experts")  # fmt: skip
    cached = sum(item.nbytes for item in plan.caches)
    assert stored + cached >= SIZES.experts
    assert plan.fits == all(t.need <= t.have for t in plan.tiers)
    for option in plan.options:
        assert option.need <= totals[0] * MIB
    assert plan == make_plan(wanted)
    assert explain(plan)


def test_a_driver_that_pins_too_little_is_not_blamed_on_the_model() -> None:
    plan = make_plan(request(1000, pins=5 * MIB))
    assert tier(plan, "pinned").short_by == 5 * MIB
    remedy = does_not_fit(plan, "m").remedy
    assert "STRATA_PIN_LIMIT_GIB" in remedy
    assert "--backend cpu" in remedy
    assert "smaller weights" not in remedy


@pytest.mark.parametrize(
    ("rule", "path", "nbytes"),
    [
        (Bulk(), "path 2, in slices", 2000),
        (Bulk(one=True), "path 1, one allocation", 2000),
        (Bulk(one=True, most=600 * MIB), "path 2, in slices", 600),
        (Bulk(prefix=True, most=600 * MIB), "pinned prefix", 600),
        (Bulk(most=0), "path 3, locked at most", 0),
        # the limit is of everything: 100 of the embedding and 10 of small buffers come first
        (Bulk(limit=1110 * MIB), "path 2, in slices", 1000),
        (Bulk(limit=90 * MIB, one=True), "path 3, locked at most", 0),
    ],
)
def test_the_expected_way_of_page_locking(rule: Bulk, path: str, nbytes: int) -> None:
    plan = make_plan(request(1000, bulk={"arena": rule}, more={"source": "arena"}))
    assert plan.pinning is not None
    assert (plan.pinning.path, plan.pinning.nbytes // MIB) == (path, nbytes)
    assert plan.pinning.of == 2000 * MIB
    assert f"page-locking: {path}" in explain(plan)
    assert plan.as_json()["pinning"]["path"] == path
    assert plan.fits


def test_nothing_is_page_locked_where_nothing_is_kept() -> None:
    plan = make_plan(request(1000, more={"source": "mmap"}))
    assert plan.pinning is None
    assert plan.as_json()["pinning"] is None


@pytest.mark.parametrize("cache", [None, 100])
def test_a_moving_cache_has_empty_slots_and_buffers(cache: int | None) -> None:
    def planned(pace: Pace) -> Plan:
        asked = request(1000)
        sizes = evolve(asked.sizes, table=1 * MIB, moving=8 * MIB)
        accelerator = evolve(asked.accelerator, cache=cache, pace=pace)
        return make_plan(evolve(asked, sizes=sizes, accelerator=accelerator))

    still, moving = planned(Pace()), planned(Pace(4, 20))
    assert (still.caches[0].spare, moving.caches[0].spare) == (0, 5)
    more = tier(moving, "vram0").need - tier(still, "vram0").need
    assert moving.caches[0].experts - still.caches[0].experts == (-5 if cache is None else 0)
    assert more == (0 if cache is None else 5 * 2 * MIB)
    assert held(moving, "pinned")["small buffers"] == held(still, "pinned")["small buffers"] + 9
    assert "and 5 empty slots" in explain(moving)
