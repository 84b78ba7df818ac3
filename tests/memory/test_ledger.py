"""The ledger: claims never exceed a limit, margins are for small claims, everything comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import Refused, StrataError
from strata_core.memory.ledger import PINNED, RAM, Ledger, vram


def test_a_refusal_names_pool_purpose_need_and_have() -> None:
    ledger = Ledger()
    ledger.limit(PINNED, 10 << 20, margin=2 << 20)
    ledger.take(PINNED, 3 << 20, "doorbells", small=True)
    with pytest.raises(Refused) as caught:
        ledger.take(PINNED, 6 << 20, "the experts")
    error = caught.value
    assert error.what == "6.00 MiB of pinned memory for the experts cannot be had"
    assert "5.00 MiB are left of 10.00 MiB (3.00 MiB in use, 2.00 MiB kept for small)" in error.why
    assert ledger.used(PINNED) == 3 << 20


def test_the_margin_is_for_small_claims() -> None:
    ledger = Ledger()
    ledger.limit(PINNED, 100, margin=30)
    ledger.take(PINNED, 70, "bulk")
    assert (ledger.room(PINNED), ledger.room(PINNED, small=True)) == (0, 30)
    ledger.take(PINNED, 30, "rings", small=True)
    with pytest.raises(Refused):
        ledger.take(PINNED, 1, "rings", small=True)


def test_pools_are_separate_and_named() -> None:
    ledger = Ledger(devices=2)
    ledger.limit(vram(0), 5)
    ledger.take(vram(1), 1000, "cache")
    with pytest.raises(Refused):
        ledger.take(vram(0), 6, "cache")
    for name in (vram(2), "pined", ""):
        with pytest.raises(StrataError, match="pools are pinned, ram, vram0, vram1"):
            ledger.take(name, 1, "x")


def test_a_claim_is_released_once() -> None:
    ledger = Ledger()
    first, second = ledger.take(RAM, 10, "a"), ledger.take(RAM, 10, "a")
    first.release()
    first.release()
    assert ledger.used(RAM) == 10
    assert ledger.outstanding() == (second,)
    assert ledger.peak(RAM) == 20


def test_a_limit_set_below_what_is_used_refuses_but_takes_nothing_away() -> None:
    ledger = Ledger()
    claim = ledger.take(RAM, 10, "a")
    ledger.limit(RAM, 4)
    assert ledger.room(RAM) == 0
    with pytest.raises(Refused, match="cannot be had"):
        ledger.take(RAM, 1, "b")
    assert list(ledger) == [claim]


def test_a_negative_claim_is_an_error() -> None:
    with pytest.raises(StrataError, match="-1 bytes"):
        Ledger().take(RAM, -1, "a")


def test_threads_together_never_exceed_the_limit() -> None:
    ledger = Ledger()
    ledger.limit(PINNED, 50)

    def work(_: int) -> int:
        seen = 0
        for _round in range(200):
            try:
                claim = ledger.take(PINNED, 7, "t")
            except Refused:
                continue
            seen = max(seen, ledger.used(PINNED))
            claim.release()
        return seen

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= 50
    assert ledger.peak(PINNED) <= 49
    assert ledger.used(PINNED) == 0


@given(
    st.integers(0, 60),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=30),
)
def test_like_a_plain_sum(limit: int, margin: int, steps: list[tuple[int, bool, bool]]) -> None:
    ledger, held = Ledger(), []
    ledger.limit(PINNED, limit, margin)
    for nbytes, small, give_back in steps:
        if give_back and held:
            held.pop(nbytes % len(held)).release()
            continue
        fits = sum(c.nbytes for c in held) + nbytes <= limit - (0 if small else margin)
        try:
            held.append(ledger.take(PINNED, nbytes, "x", small=small))
            assert fits
        except Refused:
            assert not fits
        assert ledger.used(PINNED) == sum(c.nbytes for c in held)
    assert set(ledger.outstanding()) == set(held)
