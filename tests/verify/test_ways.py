"""The table of ways: what is in it for a backend, and what given settings leave of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.config import resolve
from strata_core.setting_table import BY_KEY
from strata_core.verify.ways import CACHES, PLACES, VARIATIONS, Model, Way, ways

GIB = 1 << 30
MODEL = Model(experts=40, nbytes=4 * GIB, cells=5 * GIB, beside=GIB, hashed=True)


def names(found: tuple[Way, ...]) -> list[str]:
    return [str(way) for way in found]


def test_a_backend_without_devices_has_the_sources_alone() -> None:
    found = ways(MODEL)
    assert [way.place for way in found if "," not in way.place] == ["arena", "mmap"]
    tiers = [way for way in found if way.options["source"] == "tiered-file"]
    assert [round(way.options["ram_budget"], 6) for way in tiers] == [1.0, 2.25, 3.5, 6.0]
    assert {way.cache for way in found} == {""}
    assert not any("expert_cache" in way.options for way in found)
    assert "arena, reads verified" in names(found)


def test_a_backend_with_a_device_has_every_place_with_every_cache() -> None:
    found = ways(MODEL, devices=(0,))
    pairs = {(way.place, way.cache) for way in found}
    assert pairs >= {(place.name, cache) for place in PLACES for cache in CACHES}
    counts = {way.cache: way.options["expert_cache"] for way in found if way.place == "arena"}
    assert counts == {"0": 0, "1": 1, "half": 20, "all": 40, "auto": "auto"}
    assert len(found) >= 40
    paces = {
        (way.place, way.options["adapt_every"]) for way in found if "adapt_every" in way.options
    }
    assert paces >= {(f"{place.name}, static", 0) for place in PLACES}
    assert paces >= {(f"{place.name}, adapts each round", 1) for place in PLACES}
    assert ("arena, adapts every 4 rounds", 4) in paces
    quick = ways(MODEL, devices=(0,), quick=True)
    assert {(way.place, way.cache) for way in quick} == {
        *((place.name, "half") for place in PLACES),
        *(("arena", cache) for cache in CACHES),
    }


def test_helpers_are_used_where_they_are_asked_for_and_nowhere_else() -> None:
    found = ways(MODEL, devices=(1, 0, 2))
    helped = [way for way in found if "expert_cache_device1" in way.options]
    assert {"arena, 1 helper, cache half", "arena, 2 helpers, cache half"} <= set(names(found))
    assert {way.cache for way in helped} == set(CACHES)
    for way in found:
        assert ("device" in way.options) == (way not in helped), way
        assert way.options.get("device", (1,)) == (1,)
        assert not (way in helped and way.options["source"] == "tiered-file")


def test_all_ways_differ_and_have_a_name_of_their_own() -> None:
    for devices in ((), (0,), (0, 1), (0, 1, 2, 3, 4)):
        found = ways(MODEL, devices=devices)
        assert len(set(names(found))) == len(found)


@pytest.mark.parametrize("devices", [(), (0,), (0, 1, 2, 3)])
def test_every_way_is_made_of_settings_that_there_are(devices: tuple[int, ...]) -> None:
    settings = resolve({}, {})
    for way in ways(MODEL, devices=devices):
        taken = settings.with_arguments(way.options)
        assert {key: taken.options()[key] for key in way.options} == dict(way.options)


def test_settings_of_a_later_version_are_left_out() -> None:
    pending = {key for item in VARIATIONS for key in item.options if BY_KEY[key].pending}
    for way in ways(MODEL, devices=(0,)):
        assert not pending & set(way.options)


GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "source": st.sampled_from(["arena", "mmap", "sliced-pinned", "tiered-file", "other"]),
        "expert_cache": st.sampled_from([0, 1, 7, "auto"]),
        "complement_pin_gib": st.sampled_from(["all", 0.0, 2.0]),
        "ram_budget": st.just(3.0),
        "expert_cache_device1": st.just(5),
        "verify_reads": st.sampled_from(["all", "off"]),
    },
)


@given(asked=GIVEN, devices=st.sampled_from([(), (0,), (0, 1)]), quick=st.booleans())
def test_what_is_given_holds_in_every_way(
    asked: dict[str, Any], devices: tuple[int, ...], quick: bool
) -> None:
    found = ways(MODEL, devices=devices, given=asked, quick=quick)
    assert found
    for way in found:
        for key, value in way.options.items():
            assert asked.get(key, value) == value
    everything = ways(MODEL, devices=devices, given=asked)
    assert set(names(found)) <= set(names(everything))
