"""Chunks of prompts: so long that computing covers copying, within the device's memory."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.chunk import COVERED, MOST, SHARE, USUAL, balance, suiting
from strata_core.plan.devices import Bulk
from strata_core.plan.explain import explain
from strata_core.plan.lending import (
    AHEAD,
    LEAST,
    OWN_WAVE,
    WAVE,
    lendable,
    own_buffers,
    wanted_buffers,
)
from strata_core.plan.plan import PlanRequest, Sizes, decide, make_plan
from strata_core.plan.speed import Lane, Pace, Rate

from .device_requests import MIB, request

LENGTHS = (MOST, USUAL, 2048, 1024, 256, 64)


def shaped(link: float, ops: float) -> Pace:
    rates: dict[Lane, Rate] = {
        "vram": Rate(1000e9, "a"),
        "link": Rate(link, "b"),
        "host": Rate(50e9, "c"),
        "file": Rate(1e9, "d"),
    }
    return Pace(rates=rates, dense=0, compute=Rate(ops, "e"))


def candidates(sizes: Sizes, each: int) -> list[Sizes]:
    """The same by chunk, `each` bytes of buffers a token."""
    return [evolve(sizes, chunk=n, prompt=n * each) for n in LENGTHS]


def large(cache: int | None = None, link: float = 50e9, mib: int = 140_000) -> PlanRequest:
    """48 layers of 128 experts of 2.6 MiB, eight a token, as of a model of 30 billion weights."""
    made = request(mib, cache=cache, more={"ram": 64 << 30, "trained": 4096, "source": "arena"})
    sizes = Sizes(
        dense=900 * MIB,
        experts=int(6144 * 2.6 * MIB),
        kv_position=96 << 10,
        workspace=100 * MIB,
        count=6144,
        layers=48,
        lends=LEAST,
        token_ops=5_400_000_000,
    )
    return evolve(made, sizes=sizes, pace=shaped(link, 84e12))


@pytest.mark.parametrize(
    ("cache", "link", "tokens"),
    [
        (0, 50e9, 4096),
        (3072, 50e9, 4096),
        (6144, 50e9, 4096),
        (0, 25e9, 8192),
        (0, 200e9, 4096),
    ],
)
def test_a_large_model_has_the_chunk_that_its_link_asks_for(cache, link, tokens) -> None:
    wanted = large(cache, link)
    sizes, because, shorter = suiting(candidates(wanted.sizes, 150 << 10), wanted, decide)
    assert sizes.chunk == tokens
    assert [other.chunk for other in shorter] == [n for n in LENGTHS if n < tokens]
    plan = make_plan(evolve(wanted, sizes=sizes, chunk_because=because))
    assert plan.prompts is not None
    assert plan.prompts.compute_s == pytest.approx(tokens * 5.4e9 / 84e12)
    brought = 0 if cache == 6144 else 6144 - cache + lendable(cache, 6144, 48)
    assert plan.prompts.experts == brought
    assert plan.prompts.copy_s == pytest.approx(brought * 2.6 * MIB / link, rel=1e-3)
    assert f"prompts: chunks of {tokens} tokens ({because})" in explain(plan)
    assert plan.as_json()["prompts"]["tokens"] == tokens


def test_no_model_is_refused_for_a_chunk_that_nobody_asked_for() -> None:
    """Keys and values of a context that was asked for leave less than would suit."""
    wanted = evolve(large(0, 25e9, 24_000), context=235_000)
    sizes, because, shorter = suiting(candidates(wanted.sizes, 150 << 10), wanted, decide)
    assert sizes.chunk == 4096
    assert because == "as long as DEV0 has room for beside the rest"
    assert [other.chunk for other in shorter] == [2048, 1024, 256, 64]
    assert decide(evolve(wanted, sizes=sizes)).fits
    plan = decide(evolve(wanted, sizes=candidates(wanted.sizes, 150 << 10)[0]))
    assert plan.tier("vram0").short_by > 0


def test_a_chunk_that_was_named_says_so() -> None:
    wanted = large(0)
    plan = make_plan(evolve(wanted, sizes=candidates(wanted.sizes, 0)[LENGTHS.index(1024)]))
    assert "chunks of 1024 tokens (named by --prefill): it brings 6144 experts" in explain(plan)


def test_what_is_not_page_locked_comes_more_slowly() -> None:
    wanted = large(0)
    wanted = evolve(wanted, sizes=candidates(wanted.sizes, 0)[0])
    accelerator = wanted.accelerator

    def seconds(source: str, most: int | None) -> float:
        bulk = {"arena": Bulk(most=most)}
        asked = evolve(wanted, source=source, accelerator=evolve(accelerator, bulk=bulk))
        found = balance(asked, decide(asked))
        assert found is not None
        return found.copy_s

    locked, half, none = (seconds("arena", most) for most in (None, wanted.sizes.experts // 2, 0))
    assert half == pytest.approx((locked + none) / 2, rel=1e-3)
    assert none == pytest.approx(locked * 50 / 7)
    assert seconds("mmap", None) > none


@given(
    cache=st.integers(0, 1200),
    link=st.floats(1e8, 1e12),
    ops=st.floats(1e10, 1e15),
    each=st.integers(0, 1 << 18),
    mib=st.integers(600, 6000),
    token_ops=st.integers(0, 10**10),
)
def test_the_chunk_is_the_shortest_that_covers_its_copies(
    cache, link, ops, each, mib, token_ops
) -> None:
    wanted = request(mib, cache=cache, more={"source": "arena"})
    sizes = evolve(wanted.sizes, layers=10, lends=LEAST, token_ops=token_ops)
    wanted = evolve(wanted, sizes=sizes, pace=shaped(link, ops))
    all_sizes = candidates(sizes, each)
    chosen, because, shorter = suiting(all_sizes, wanted, decide)
    assert because
    left = list(shorter)
    # none is lost: what does not fit after all is proposed with a shorter one
    assert [s.chunk for s in left] == [n for n in LENGTHS if n < chosen.chunk]
    roomy = [s for s in all_sizes if not decide(evolve(wanted, sizes=s)).tier("vram0").short_by]
    assert chosen in roomy or not roomy, "no model is refused for a chunk that nobody asked for"
    room = wanted.accelerator.room(0) // SHARE
    assert chosen.prompt <= room or chosen is all_sizes[-1] or not roomy
    if roomy != all_sizes:
        return

    def covers(one: Sizes) -> bool:
        asked = evolve(wanted, sizes=one)
        found = balance(asked, decide(asked))
        assert found is not None
        return found.compute_s >= COVERED * found.copy_s

    longer = [s for s in all_sizes if chosen.chunk < s.chunk and s.prompt <= room]
    if longer:
        assert chosen.chunk >= USUAL
        assert covers(chosen)
    if left and left[0].chunk >= USUAL:
        assert not covers(left[0])
    faster, _, _ = suiting(all_sizes, evolve(wanted, pace=shaped(2 * link, ops)), decide)
    assert faster.chunk <= chosen.chunk
    stronger, _, _ = suiting(all_sizes, evolve(wanted, pace=shaped(link, 2 * ops)), decide)
    assert stronger.chunk >= chosen.chunk, "who computes faster has to compute more"


def test_without_rates_nothing_is_promised() -> None:
    wanted = large(0)
    unknown = evolve(wanted, pace=evolve(wanted.pace, compute=None))
    sizes, _, _ = suiting(candidates(wanted.sizes, 0), unknown, decide)
    assert sizes.chunk == USUAL
    assert make_plan(evolve(unknown, sizes=sizes)).prompts is None


@given(st.integers(0, 7000), st.integers(1, 200), st.integers(1, 64), st.integers(0, 10_000))
def test_buffers_are_counted_by_one_rule(cached, experts, layers, room) -> None:
    total = experts * layers
    lent, own = lendable(cached, total, layers), own_buffers(cached, experts, layers, room)
    assert 0 <= lent <= min(cached, wanted_buffers(max(0, total - cached), layers))
    assert not (lent and own), "what is lent is enough"
    assert bool(lent) == (LEAST <= cached < total)
    assert lent <= max(2 * OWN_WAVE, cached // 2)
    if own:
        assert cached < LEAST
        assert own <= max(2 * OWN_WAVE, room)
        assert own <= max(2 * OWN_WAVE, total)
    assert wanted_buffers(total, layers) >= AHEAD * experts + WAVE
