"""The settings about page-locked memory: what each takes, and what it refuses."""

from __future__ import annotations

import pytest

from strata_core.config import resolve, unknown_variables
from strata_core.engine.devices import without_source, without_use
from strata_core.errors import UsageError
from strata_core.interfaces import BackendRecord
from strata_core.setting import BadValue
from strata_core.setting_memory import MEMORY_SETTINGS
from strata_core.setting_table import BY_KEY

NUMBERS = [setting for setting in MEMORY_SETTINGS if setting.kind == "gib"]


def test_the_defaults_are_the_documented_ones() -> None:
    settings = resolve({}, {})
    assert (settings.complement_pin_gib, settings.arena_pin_gib) == (None, None)
    assert settings.pin_margin_gib == 4.0
    assert (settings.partial_pin, settings.partial_pin_gib) == (False, None)
    assert (settings.resident_budget_gib, settings.pin_limit_gib) == (None, None)
    assert settings.test_complement_refuse is False


@pytest.mark.parametrize("key", ["complement_pin_gib", "arena_pin_gib"])
def test_a_size_or_a_word(key: str) -> None:
    word = {"complement_pin_gib": "all", "arena_pin_gib": "auto"}[key]
    other = {"all": "auto", "auto": "all"}[word]
    for text, value in ((word, word), ("0", 0.0), ("12.5", 12.5)):
        assert resolve({}, {BY_KEY[key].env: text}).options()[key] == value
    with pytest.raises(BadValue, match=f", or {word}, is wanted"):
        BY_KEY[key].parse(other)
    assert BY_KEY[key].values == ("GIB", word)


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda s: s.key)
@pytest.mark.parametrize("text", ["-1", "lots", "nan", "inf", "9999999", True, [1]])
def test_no_size_is_refused(setting, text: object) -> None:
    with pytest.raises(BadValue, match="GiB"):
        setting.parse(text)


def test_one_has_a_flag_and_all_have_variables() -> None:
    flags = {setting.key: setting.flag for setting in MEMORY_SETTINGS if setting.flag}
    assert flags == {"resident_budget_gib": "--resident-budget-gib"}
    settings = resolve({"resident_budget_gib": "0"}, {"STRATA_TEST_COMPLEMENT_REFUSE": "1"})
    assert settings.resident_budget_gib == 0.0
    assert settings.test_complement_refuse is True
    assert unknown_variables({s.env: "1" for s in MEMORY_SETTINGS}) == ()


def test_a_piece_without_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match="STRATA_PARTIAL_PIN_GIB"):
        resolve({}, {"STRATA_PARTIAL_PIN_GIB": "0"})


def backend(*, devices: bool) -> BackendRecord:
    """A record as far as settings ask one."""
    return BackendRecord(
        name="b",
        summary="",
        api=(1, 0),
        probe=lambda machine: None,  # type: ignore[arg-type,return-value]
        build=lambda context: None,  # type: ignore[arg-type,return-value]
        devices=(lambda machine, options: ()) if devices else None,
    )


def test_a_budget_without_resident_experts_is_not_passed_over() -> None:
    given, cpu = {"resident_budget_gib": "2"}, backend(devices=False)
    assert without_source(resolve(given, {}), "sliced-pinned", cpu) == ()
    assert without_source(resolve({}, {}), "arena", cpu) == ()
    with pytest.raises(UsageError, match="--resident-budget-gib has no effect here") as caught:
        without_source(resolve(given, {}), "arena", cpu)
    assert "--resident-experts" in caught.value.remedy
    (item,) = without_source(resolve({}, {"STRATA_RESIDENT_BUDGET_GIB": "2"}), "mmap", cpu)
    assert "STRATA_RESIDENT_BUDGET_GIB" in item.what


SOURCES = ("arena", "sliced-pinned", "tiered-file", "mmap")


@pytest.mark.parametrize(
    ("variable", "value", "heeded"),
    [
        ("STRATA_ARENA_PIN_GIB", "1", {"arena"}),
        ("STRATA_ARENA_PIN_GIB", "auto", {"arena"}),
        ("STRATA_COMPLEMENT_PIN_GIB", "all", {"sliced-pinned"}),
        ("STRATA_TEST_COMPLEMENT_REFUSE", "1", {"sliced-pinned"}),
        ("STRATA_PARTIAL_PIN", "1", {"arena", "sliced-pinned"}),
        ("STRATA_TIER_VERIFY", "1", {"tiered-file", "sliced-pinned"}),
        ("STRATA_TIER_VERIFY", "0", set(SOURCES)),
        ("STRATA_PIN_MARGIN_GIB", "1", set(SOURCES)),
    ],
)
def test_a_setting_that_the_source_does_not_heed_is_told_of(
    variable: str, value: str, heeded: set[str]
) -> None:
    settings = resolve({}, {variable: value})
    for source in SOURCES:
        found = without_source(settings, source, backend(devices=True))
        assert (found == ()) == (source in heeded), source
        for item in found:
            assert variable in item.what
            assert source in item.why


def test_a_setting_about_devices_is_told_of_once() -> None:
    settings = resolve({}, {"STRATA_ARENA_PIN_GIB": "1"})
    assert without_source(settings, "mmap", backend(devices=False)) == ()
    assert len(without_use(settings, backend(devices=False))) == 1
    assert without_use(settings, backend(devices=True)) == ()
