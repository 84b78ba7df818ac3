"""The planner: what fits where, and what would fit instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.explain import does_not_fit, explain
from strata_core.plan.plan import (
    BASE_BYTES,
    SMALLEST_CONTEXT,
    Plan,
    PlanRequest,
    Sizes,
    Tier,
    make_plan,
)
from strata_core.plan.tier import LowRam, tier_degradations

MIB = 1 << 20
SIZES = Sizes(dense=100 * MIB, experts=1000 * MIB, kv_position=MIB // 4, workspace=8 * MIB)


def request(ram_mib: int, **more: object) -> PlanRequest:
    values: dict[str, object] = {
        "sizes": SIZES,
        "ram": ram_mib * MIB,
        "ram_origin": "available",
        "reserve": 0,
        "trained": 4096,
    }
    return PlanRequest(**{**values, **more})


def test_the_arena_is_taken_where_it_fits() -> None:
    plan = make_plan(request(4000))
    assert (plan.source, plan.context, plan.fits) == ("arena", 4096, True)
    assert plan.context_because == "the trained length"


def test_the_mapped_file_is_taken_where_the_arena_does_not_fit() -> None:
    plan = make_plan(request(1200))
    assert (plan.source, plan.fits) == ("mmap", True)
    assert [tier.need for tier in plan.tiers if tier.name == "file"] == [1000 * MIB]


def test_the_resident_complement_takes_no_more_than_its_budget() -> None:
    named = {"source": "sliced-pinned", "resident": 200 * MIB}
    plan = make_plan(request(1200, **named))
    assert plan.fits
    assert {item.name: item.nbytes for item in ram_tier(plan).items}["experts"] == 200 * MIB
    assert [tier.need for tier in plan.tiers if tier.name == "file"] == [800 * MIB]


@pytest.mark.parametrize(("ring", "source"), [(1, "tiered-file"), (2000, "mmap")])
def test_a_tier_whose_own_buffers_do_not_fit_is_not_chosen(ring: int, source: str) -> None:
    low_ram = LowRam(because="little memory", cells=1000 * MIB, ring=ring * MIB)
    plan = make_plan(request(1200, low_ram=low_ram))
    assert (plan.source, plan.fits) == (source, True)
    if source == "mmap":
        assert "buffers of a tier" in plan.source_because
        (said,) = [
            d for d in tier_degradations(request(1200, low_ram=low_ram), plan) if "tier" in d.what
        ]
        assert said.why == plan.source_because


def ram_tier(plan: Plan) -> Tier:
    return next(tier for tier in plan.tiers if tier.name == "ram")


def test_the_context_stays_clear_of_the_reserve() -> None:
    plan = make_plan(request(4000, reserve=3000 * MIB))
    assert (plan.source, plan.fits) == ("mmap", True)
    assert plan.context == (1000 - 108 - BASE_BYTES // MIB) * 4
    assert plan.context_because == "what fits beside the reserve; the model was trained on 4096"
    assert (ram_tier(plan).have, plan.reserve_used) == (1000 * MIB, 0)
    assert "available, less the reserve of 2.93 GiB" in explain(plan)


@pytest.mark.parametrize(
    ("named", "because"),
    [
        ({"source": "arena"}, "asked for: source arena (named by --source)"),
        ({"context": 4096}, "asked for: --max-context 4096"),
        (
            {"source": "theirs", "source_because": "it claims", "context": 4000},
            "asked for: source theirs (it claims) and --max-context 4000",
        ),
    ],
)
def test_what_was_named_takes_from_the_reserve_and_the_plan_says_so(named, because) -> None:
    plan = make_plan(request(2500, reserve=1800 * MIB, **named))
    assert plan.fits
    assert plan.reserve_because == because
    assert plan.reserve_used == ram_tier(plan).need - 700 * MIB > 0
    assert ram_tier(plan).have == 2500 * MIB
    assert because in explain(plan)
    assert plan.as_json()["reserve_used"] == plan.reserve_used


def test_a_source_that_was_named_leaves_the_least_context_the_rest_of_the_reserve() -> None:
    assert make_plan(request(2500, reserve=1800 * MIB, source="arena")).context == 512


def test_the_least_that_can_run_takes_from_the_reserve() -> None:
    plan = make_plan(request(1000, reserve=900 * MIB))
    assert (plan.source, plan.context, plan.fits) == ("mmap", 512, True)
    assert plan.reserve_used == ram_tier(plan).need - 100 * MIB
    assert plan.reserve_because == "the least that the model can run with needs it"
    assert plan.context_because == "the least; the model was trained on 4096"
    short = make_plan(request(1000, reserve=900 * MIB, trained=100))
    assert (short.context, short.fits) == (100, True)


def test_a_reserve_beyond_all_memory_is_all_of_it() -> None:
    plan = make_plan(request(1000, reserve=9000 * MIB))
    assert (plan.reserve, plan.fits) == (1000 * MIB, True)
    assert plan.reserve_used == ram_tier(plan).need


def test_the_context_is_cut_to_what_fits_and_says_so() -> None:
    plan = make_plan(request(364 + 256 + 100))
    assert plan.source == "mmap"
    assert plan.context == (364 + 256 + 100 - 108 - BASE_BYTES // MIB) * 4
    assert "4096" in plan.context_because
    assert plan.fits


def test_a_named_source_and_context_are_never_changed() -> None:
    plan = make_plan(request(500, source="arena", context=4096))
    assert (plan.source, plan.context, plan.fits) == ("arena", 4096, False)
    flags = [option.flags for option in plan.options]
    assert flags == ["--source mmap --max-context 544"]


def test_the_error_names_shortfall_and_remedy() -> None:
    plan = make_plan(request(1300, source="arena", context=4096))
    error = does_not_fit(plan, "model.gguf")
    assert "model.gguf" in error.what
    assert "short by 1.06 GiB" in error.what
    assert "--source mmap" in error.remedy
    assert error.exit_code == 1
    assert "short by" in explain(plan)


def test_what_cannot_fit_at_all_says_so() -> None:
    plan = make_plan(request(50))
    assert not plan.fits
    assert plan.options == ()
    assert "nothing smaller fits" in does_not_fit(plan, "m").remedy


@given(
    ram=st.integers(0, 10_000),
    dense=st.integers(0, 5_000),
    experts=st.integers(0, 5_000),
    kv=st.integers(0, MIB),
    trained=st.integers(1, 300_000),
    reserve=st.integers(0, 8_000),
    source=st.sampled_from([None, "arena", "mmap", "somebody's"]),
    context=st.one_of(st.none(), st.integers(1, 300_000)),
)
def test_every_plan_adds_up(
    ram: int,
    dense: int,
    experts: int,
    kv: int,
    trained: int,
    reserve: int,
    source: str | None,
    context: int | None,
) -> None:
    sizes = Sizes(dense=dense * MIB, experts=experts * MIB, kv_position=kv, workspace=MIB)
    wanted = request(
        ram, sizes=sizes, trained=trained, reserve=reserve * MIB, source=source, context=context
    )
    plan = make_plan(wanted)
    over = max(0, ram_tier(plan).need - max(0, ram - reserve) * MIB)
    assert plan.reserve_used == min(over, plan.reserve)
    assert bool(plan.reserve_because) == bool(plan.reserve_used)
    least = min(trained, SMALLEST_CONTEXT)
    if source is None and context is None:
        assert plan.context >= least
        assert not plan.reserve_used or (plan.source, plan.context) == ("mmap", least)
    assert plan.fits == all(t.need <= t.have for t in plan.tiers)
    assert 1 <= plan.context <= max(trained, context or 0)
    assert context is None or plan.context == context
    assert source is None or plan.source == source
    held = {item.what: item.nbytes for tier in plan.tiers for item in tier.items}
    assert sizes.experts == 0 or held["experts"] == sizes.experts
    for option in plan.options:
        assert option.need <= wanted.ram
    assert plan == make_plan(wanted)
    assert explain(plan)
