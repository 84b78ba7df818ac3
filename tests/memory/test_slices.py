"""Slices, rules and limits: pure decisions, against what they must have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import UsageError
from strata_core.memory.limits import PinLimit, known_limit, machine_limit
from strata_core.memory.platform import SharedRoom
from strata_core.memory.rules import ARENA, COMPLEMENT, PinRule, PinSettings
from strata_core.memory.slices import MOST_SLICES, Slice, cut_off, make_slices
from strata_core.setting_memory import MEMORY_SETTINGS

GIB = 1 << 30
PAGE = 4096
PAGES = st.integers(1, 3000)
PIN = "STRATA_COMPLEMENT_PIN_GIB allows"


@given(PAGES, st.lists(st.integers(0, 3000 * PAGE), max_size=50))
def test_slices_cover_everything_and_end_at_cuts(pages: int, cuts: list[int]) -> None:
    slices = make_slices(pages * PAGE, cuts, PAGE)
    assert [s.start for s in slices] == [0, *(s.end for s in slices[:-1])]
    assert slices[-1].end == pages * PAGE
    allowed = {-(-cut // PAGE) * PAGE for cut in cuts} | {pages * PAGE}
    for piece in slices:
        assert piece.end in allowed
        assert piece.nbytes > 0
        assert piece.start % PAGE == piece.end % PAGE == 0
    assert len(slices) <= MOST_SLICES


def test_a_layer_is_a_slice_and_small_cuts_are_joined() -> None:
    layers = [i * 8 * PAGE for i in range(6)]
    assert [s.start for s in make_slices(48 * PAGE, layers, PAGE)] == layers
    many = make_slices(4096 * PAGE, [i * PAGE for i in range(4096)], PAGE)
    assert {s.nbytes for s in many} == {8 * PAGE}


@given(PAGES, st.lists(st.integers(0, 3000 * PAGE), max_size=20), st.integers(0, 3100 * PAGE))
def test_a_limit_cuts_at_a_page(pages: int, cuts: list[int], most: int) -> None:
    slices = make_slices(pages * PAGE, cuts, PAGE)
    below, above = cut_off(slices, most, PAGE)
    assert sum(s.nbytes for s in below) == min(most // PAGE, pages) * PAGE
    assert [s.start for s in (*below, *above)][1:] == [s.end for s in (*below, *above)][:-1]
    assert sum(s.nbytes for s in (*below, *above)) == pages * PAGE
    assert cut_off(slices, None, PAGE) == (slices, ())


def test_a_slice_in_which_the_limit_falls_is_in_both() -> None:
    slices = make_slices(8 * PAGE, [4 * PAGE], PAGE)
    assert cut_off(slices, 5 * PAGE, PAGE) == (
        (Slice(0, 4 * PAGE), Slice(4 * PAGE, 5 * PAGE)),
        (Slice(5 * PAGE, 8 * PAGE),),
    )


# --- rules -------------------------------------------------------------------------------------


def rule(purpose: str, **options: object) -> PinRule:
    return PinSettings.of(options).rule(purpose)


def test_every_setting_is_read() -> None:
    assert PinSettings.of({s.key: s.default for s in MEMORY_SETTINGS}) == PinSettings()
    given = {"complement_pin_gib": 1.5, "arena_pin_gib": 2.0, "pin_margin_gib": 0.5}
    given |= {"pin_limit_gib": 3.0, "partial_pin": True, "partial_pin_gib": 0.25}
    given |= {"large_pages": True}
    assert PinSettings.of({**given, "test_complement_refuse": True}) == PinSettings(
        complement=3 * GIB // 2,
        arena=2 * GIB,
        margin=GIB // 2,
        known=3 * GIB,
        partial=True,
        partial_most=GIB // 4,
        refuse_one=True,
        large=True,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, PinRule()),
        ("all", PinRule(limit="none", one_first=True)),
        (0.0, PinRule(most=0, because=f"{PIN} 0.0 MiB", limit="none", one_first=True)),
        (2.0, PinRule(most=2 * GIB, because=f"{PIN} 2.00 GiB", limit="none", one_first=True)),
    ],
)
def test_the_complement(value: object, expected: PinRule) -> None:
    assert rule(COMPLEMENT, complement_pin_gib=value) == expected
    assert rule(COMPLEMENT, complement_pin_gib=value, arena_pin_gib=7.0) == expected
    assert rule(COMPLEMENT, complement_pin_gib=value, test_complement_refuse=True).refuse_one


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, PinRule(limit="known")),
        (0.0, PinRule(limit="known")),
        ("auto", PinRule(limit="machine")),
        (2.0, PinRule(most=2 * GIB, because="STRATA_ARENA_PIN_GIB allows 2.00 GiB", limit="known")),
    ],
)
def test_the_arena(value: object, expected: PinRule) -> None:
    assert rule(ARENA, arena_pin_gib=value) == expected
    assert rule(ARENA, arena_pin_gib=value, complement_pin_gib=7.0) == expected


@pytest.mark.parametrize(
    ("piece", "arena", "most", "because"),
    [
        (None, None, None, ""),
        (1.0, None, GIB, "STRATA_PARTIAL_PIN_GIB allows 1.00 GiB"),
        (1.0, 2.0, GIB, "STRATA_PARTIAL_PIN_GIB allows 1.00 GiB"),
        (3.0, 2.0, 2 * GIB, "STRATA_ARENA_PIN_GIB allows 2.00 GiB"),
        (None, 2.0, 2 * GIB, "STRATA_ARENA_PIN_GIB allows 2.00 GiB"),
    ],
)
def test_a_piece_is_the_smaller_of_two_sizes(piece, arena, most, because) -> None:
    found = rule(ARENA, partial_pin=True, partial_pin_gib=piece, arena_pin_gib=arena)
    assert (found.prefix, found.most, found.because) == (True, most, because)
    assert not found.one_first


def test_other_purposes_are_limited() -> None:
    assert rule("the tier", complement_pin_gib=0.0, partial_pin=True) == PinRule()


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="STRATA_PARTIAL_PIN_GIB"):
        PinSettings.of({"partial_pin_gib": 1.0})


# --- limits ------------------------------------------------------------------------------------


class Rooms:
    def __init__(self, *rooms: SharedRoom, have: int = 0) -> None:
        self.rooms, self.have = rooms or None, have

    def shared_rooms(self):
        return self.rooms

    def available(self) -> int:
        return self.have


ONE = SharedRoom("GPU One", 32 * GIB, 2 * GIB)
TWO = SharedRoom("GPU Two", 32 * GIB, 12 * GIB)
TINY = SharedRoom("Graphics of the CPU", GIB, GIB)


@pytest.mark.parametrize(
    ("devices", "room"),
    [
        (("GPU One",), 30 * GIB),
        (("GPU One", "GPU Two"), 20 * GIB),
        (("an unknown name",), 0),
        ((), 0),
    ],
)
def test_of_the_devices_in_use_the_smallest_room_counts(devices, room: int) -> None:
    limit = machine_limit(Rooms(ONE, TINY, TWO), devices, 5 * GIB, 4 * GIB)
    assert (limit.nbytes, limit.margin) == (5 * GIB + room, 4 * GIB)
    assert "4.00 GiB stay free" in limit.because


def test_without_such_budgets_what_is_available_counts() -> None:
    limit = machine_limit(Rooms(have=50 * GIB), ("GPU One",), GIB, 4 * GIB)
    assert limit == PinLimit(
        51 * GIB, 4 * GIB, "50.00 GiB are available, of which 4.00 GiB stay free"
    )


@pytest.mark.parametrize(("known", "margin"), [(GIB, GIB // 8), (64 * GIB, 4 * GIB), (0, 0)])
def test_a_known_limit_keeps_a_margin_that_it_can_spare(known: int, margin: int) -> None:
    limit = known_limit(known, 4 * GIB, "x")
    assert (limit.nbytes, limit.margin) == (known, margin)
