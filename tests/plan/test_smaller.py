"""What a plan that does not fit proposes: each limit that the user set himself is named."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.explain import does_not_fit
from strata_core.plan.moving import Pace
from strata_core.plan.plan import Plan, PlanRequest, make_plan

from .device_requests import MIB, SIZES, request


def remedy(plan: Plan) -> str:
    assert not plan.fits
    return does_not_fit(plan, "m").remedy


def chunked(wanted: PlanRequest) -> PlanRequest:
    """The request with a chunk of 2048 tokens, which takes 800 MiB, and shorter ones."""
    sizes = [
        evolve(wanted.sizes, chunk=n, prompt=n * 400 * MIB // 1024) for n in (2048, 1024, 256, 64)
    ]
    return evolve(wanted, sizes=sizes[0], chunks=tuple(sizes[1:]))


def on_the_cpu(ram: int, origin: str) -> Plan:
    return make_plan(
        PlanRequest(sizes=SIZES, ram=ram * MIB, ram_origin=origin, reserve=0, trained=64)
    )


def test_a_ram_budget_is_to_be_raised() -> None:
    plan = on_the_cpu(100, "--ram-budget")
    assert "raise --ram-budget to 0.58, or take a model" in remedy(plan)
    enough = 0.58 * 2**30 / MIB
    assert on_the_cpu(int(enough) + 1, "--ram-budget").fits


@pytest.mark.parametrize("origin", ["available", "available; --ram-budget is 90.00 GiB"])
def test_a_budget_that_does_not_bind_is_not_blamed(origin: str) -> None:
    text = remedy(on_the_cpu(100, origin))
    assert "--ram-budget" not in text
    assert "free memory" in text


def test_a_vram_budget_is_to_be_raised() -> None:
    text = remedy(make_plan(request(4000, budget=100 * MIB)))
    assert "raise --vram-budget to 0.34" in text
    assert make_plan(request(4000, budget=349 * MIB)).fits
    assert "--vram-budget" not in remedy(make_plan(request(100)))
    assert "--sim-vram" in remedy(make_plan(request(100)))


def test_a_shorter_chunk_of_prompts_is_named() -> None:
    plan = make_plan(chunked(request(600)))
    assert plan.options[0].flags == "--prefill 256"
    assert "--prefill 256" in remedy(plan)
    assert "--prefill" not in remedy(make_plan(chunked(request(100))))


@pytest.mark.parametrize(("helpers", "flags"), [
    ((0, 300), "--expert-cache-device2 246"),
    ((400, 300), "--expert-cache-device1 146 --expert-cache-device2 246"),
])  # fmt: skip
def test_a_helper_holds_what_fits(helpers: tuple[int, ...], flags: str) -> None:
    plan = make_plan(request(1000, 300, 500, helpers=helpers, cache=0))
    assert [option.flags for option in plan.options] == [flags]
    assert flags in remedy(plan)


@pytest.mark.parametrize("at_once", [0, 4, 64])
def test_the_largest_cache_that_fits_is_named(at_once: int) -> None:
    wanted = request(1000, cache=500, pace=Pace(at_once, 20), more={"context": 1024})
    plan = make_plan(wanted)
    flags = plan.options[0].flags.split()
    assert flags[0] == "--expert-cache"
    assert 0 < int(flags[1]) <= 262

    def fits(cache: int) -> bool:
        return make_plan(evolve(wanted, accelerator=evolve(wanted.accelerator, cache=cache))).fits

    assert fits(int(flags[1]))
    assert not fits(int(flags[1]) + 1)


@pytest.mark.parametrize("at_once", [0, 4, 64])
def test_a_context_is_cut_beside_the_empty_slots_too(at_once: int) -> None:
    plan = make_plan(request(1000, cache=100, pace=Pace(at_once, 20), more={"trained": 4096}))
    assert plan.fits
    assert plan.context < 4096


@given(
    totals=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    cache=st.none() | st.integers(0, 1500),
    helpers=st.lists(st.none() | st.integers(0, 1500), max_size=3),
    at_once=st.integers(0, 64),
    context=st.none() | st.integers(1, 9000),
)
def test_every_option_fits(
    totals: list[int],
    cache: int | None,
    helpers: list[int | None],
    at_once: int,
    context: int | None,
) -> None:
    asked = chunked(
        request(
            *totals,
            cache=cache,
            helpers=tuple(helpers),
            pace=Pace(at_once, 20),
            more={"context": context},
        )
    )
    plan = make_plan(asked)
    for option in plan.options:
        words = option.flags.split()
        flags = dict(zip(words[::2], words[1::2], strict=True))
        sizes = {s.chunk: s for s in (asked.sizes, *asked.chunks)}
        given_helpers = [
            int(flags.get(f"--expert-cache-device{n}", -1)) for n in range(1, len(helpers) + 1)
        ]
        accelerator = evolve(
            asked.accelerator,
            cache=int(flags["--expert-cache"]) if "--expert-cache" in flags else cache,
            helpers=tuple(
                old if new < 0 else new for old, new in zip(helpers, given_helpers, strict=True)
            ),
        )
        again = evolve(
            asked,
            sizes=sizes[int(flags.get("--prefill", 2048))],
            accelerator=accelerator,
            source=flags.get("--source", plan.source),
            context=int(flags.get("--max-context", plan.context)),
        )
        assert make_plan(again).fits
