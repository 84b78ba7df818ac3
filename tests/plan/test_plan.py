"""The planner: what fits where, and what would fit instead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.explain import does_not_fit, explain
from strata_core.plan.plan import BASE_BYTES, PlanRequest, Sizes, make_plan

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


def test_the_reserve_counts_for_the_choice_but_not_for_fitting() -> None:
    assert make_plan(request(4000, reserve=3000 * MIB)).source == "mmap"
    assert make_plan(request(4000, reserve=3000 * MIB)).fits


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
    source=st.sampled_from([None, "arena", "mmap", "somebody's"]),
    context=st.one_of(st.none(), st.integers(1, 300_000)),
)
def test_every_plan_adds_up(
    ram: int,
    dense: int,
    experts: int,
    kv: int,
    trained: int,
    source: str | None,
    context: int | None,
) -> None:
    sizes = Sizes(dense=dense * MIB, experts=experts * MIB, kv_position=kv, workspace=MIB)
    wanted = request(ram, sizes=sizes, trained=trained, source=source, context=context)
    plan = make_plan(wanted)
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
