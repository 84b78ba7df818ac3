"""The table of ways: what is in it for a backend, and what given settings leave of it."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.config import resolve
from strata_core.plan.actual import Actual
from strata_core.setting_table import BY_KEY
from strata_core.verify.about import About
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


def test_ways_that_are_about_something_say_so() -> None:
    def about(way: Way) -> str:
        return "; ".join(map(str, way.about))

    expected = {
        "path 1": "memory pinned",
        "path 2, partly": "memory sliced, partly page-locked",
        "path 3": "memory locked or pageable",
        "pinned prefix": "memory pinned prefix",
        "link's share 0.37": "lane pcie",
        "link's share 1.0": "lane pcie",
        "adapts each round": "lane entered",
        "adapts every 4 rounds": "lane entered",
        "helped": "lane helper",
        "2 helpers": "lane helper",
        "reads verified": "reads compared",
        "stepped rounds": "stepped rounds",
        "doorbell rounds": "doorbell rounds",
    }
    found = ways(MODEL, devices=(0, 1, 2))
    for word, text in expected.items():
        named = [way for way in found if word in way.place.split(", ") or way.place == word]
        named += [way for way in found if way.place.startswith(f"{word}, ")]
        assert named, word
        assert all(text in about(way) for way in named), word
    for way in found:
        if way.place in ("arena", "mmap") or "static" in way.place.split(", ")[-1:]:
            assert "lane" not in about(way)
        share, every = way.options.get("pcie_frac"), way.options.get("adapt_every")
        assert ("lane pcie" in about(way)) == bool(share)
        assert ("lane entered" in about(way)) == bool(every)
        assert ("lane helper" in about(way)) == ("expert_cache_device1" in way.options)
        assert ("memory" in about(way)) == (
            way.options["source"] == "sliced-pinned" or "partial_pin" in way.options
        )


SLICED = Actual(host=100, pinned=40, paths=("resident experts: sliced, 0.4 of 1.0 page-locked",))
PATHS = About(paths=("sliced",))


@pytest.mark.parametrize(
    ("about", "counters", "actual", "reads", "missed"),
    [
        (About(), {}, Actual(), {}, ""),
        (About(lane="pcie"), {"pcie": {"experts": 1}}, Actual(), {}, ""),
        (About(lane="pcie"), {"pcie": {"experts": 0}}, Actual(), {}, "over the link"),
        (About(lane="entered"), {}, Actual(), {}, "no expert entered the cache"),
        (About(lane="helper"), {"pcie": {"experts": 3}}, Actual(), {}, "no helper"),
        (About(lane="file"), {}, Actual(), {}, "lane file served no expert"),
        (PATHS, {}, SLICED, {}, ""),
        (PATHS, {}, Actual(), {}, "no expert lay in host memory"),
        (About(paths=("pinned",)), {}, SLICED, {}, "the memory was sliced, not pinned"),
        (About(paths=("pinned", "sliced"), partly=True), {}, SLICED, {}, ""),
        (evolve(PATHS, partly=True), {}, evolve(SLICED, pinned=100), {}, "all of the memory"),
        (evolve(PATHS, partly=True), {}, evolve(SLICED, pinned=0), {}, "none of the memory"),
        (About(reads=True), {}, Actual(), {"compared": 0}, "no read was compared"),
        (About(reads=True), {}, Actual(), {"compared": None}, "no read was compared"),
        (About(reads=True), {}, Actual(), {"compared": 16}, ""),
    ],
)
def test_what_a_run_did_not_do(
    about: About, counters: Any, actual: Actual, reads: Any, missed: str
) -> None:
    said = about.missed(counters, actual, reads, {})
    assert missed in said
    assert bool(said) == bool(missed)


@pytest.mark.parametrize("mode", ["stepped", "doorbell", "device"])
def test_rounds_of_another_mode_prove_nothing(mode: str) -> None:
    lanes = {"dispatch": {"mode": mode, "because": "of a test"}}
    said = About(dispatch="doorbell").missed({}, Actual(), {}, lanes)
    assert said == ("" if mode == "doorbell" else f"rounds were {mode}: of a test")
