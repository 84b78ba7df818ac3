"""The settings about devices: what each takes, where it comes from, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.config import resolve
from strata_core.errors import UsageError
from strata_core.setting import BadValue, made
from strata_core.setting_table import BY_KEY

COUNTS = ["expert_cache", "expert_cache_device1", "expert_cache_device2", "expert_cache_device3"]


def test_the_defaults_are_the_documented_ones() -> None:
    settings = resolve({}, {})
    assert settings.expert_cache == "auto"
    assert [settings.options()[key] for key in COUNTS[1:]] == [0, 0, 0]
    assert settings.vram_reserve_mib is None
    assert (settings.device, settings.vram_budget, settings.expert_profile) == (None, None, None)
    assert settings.early_remote_contexts is None
    assert (settings.sim_vram, settings.sim_pin_budget, settings.sim_devices) == (8.0, None, 1)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("0", 0), ("5000", 5000)])
def test_a_count_is_a_number_or_auto(key: str, text: str, value: object) -> None:
    assert resolve({key: text}, {}).options()[key] == value
    assert resolve({}, {BY_KEY[key].env: text}).options()[key] == value


@pytest.mark.parametrize("text", ["Auto", "-1", "1.5", "", "many", True, None, 1.0])
def test_a_count_refuses_anything_else(text: object) -> None:
    with pytest.raises(BadValue, match=r"^a whole number of at least 0, or auto, is wanted$"):
        BY_KEY["expert_cache"].parse(text)


@pytest.mark.parametrize(
    ("given", "value"), [("0", (0,)), ("2, 0,1", (2, 0, 1)), (1, (1,)), ([3, 1], (3, 1))]
)
def test_devices_are_indices(given: object, value: tuple[int, ...]) -> None:
    assert resolve({"device": given}, {}).device == value


@pytest.mark.parametrize("given", ["", "a", "0,,1", "1,1", "-1", "256", [], True, 1.0, [True]])
def test_devices_refuse_anything_else(given: object) -> None:
    with pytest.raises(BadValue):
        BY_KEY["device"].parse(given)


def test_early_contexts_have_three_states() -> None:
    values = [resolve({}, {"STRATA_EARLY_REMOTE_CONTEXTS": v}) for v in ("1", "0", "")]
    assert [item.early_remote_contexts for item in values] == [True, False, None]
    assert BY_KEY["early_remote_contexts"].flag is None


def test_resident_experts_is_the_source_sliced_pinned() -> None:
    settings = resolve({"resident_experts": True}, {})
    assert (settings.source, settings.origin("source")) == (
        "sliced-pinned",
        "flag --resident-experts",
    )
    with pytest.raises(UsageError, match="contradicts the source"):
        resolve({"resident_experts": True, "mmap_experts": True}, {})


def test_sizes_and_files() -> None:
    given = {"sim_vram": "0.05", "sim_pin_budget": "0", "vram_budget": "20", "sim_devices": "3"}
    settings = resolve({**given, "expert_profile": "p.json"}, {})
    assert (settings.sim_vram, settings.sim_pin_budget, settings.vram_budget) == (0.05, 0.0, 20.0)
    assert (settings.sim_devices, settings.expert_profile) == (3, Path("p.json"))
    for bad in ({"sim_vram": "0"}, {"sim_devices": "0"}, {"sim_devices": "17"}):
        with pytest.raises(UsageError):
            resolve(bad, {})


def test_what_may_be_given_is_said_in_words() -> None:
    assert BY_KEY["expert_cache"].values == ("N", "auto")
    assert BY_KEY["kv"].values == ("fp32", "fp16", "int8")
    assert BY_KEY["sim_vram"].values == ("GIB",)
    assert made("x", "switch", "model", "X.").values == ()


def test_the_pace_of_a_cache_has_defaults_and_bounds() -> None:
    settings = resolve({}, {})
    assert (settings.adapt_every, settings.adapt_swaps) == (4, 96)
    assert resolve({"adapt_every": "0"}, {"STRATA_ADAPT_SWAPS": "7"}).adapt_swaps == 7
    for key, value in (("adapt_every", "-1"), ("adapt_swaps", "0"), ("adapt_every", "often")):
        with pytest.raises(UsageError, match=f"--{key.replace('_', '-')}"):
            resolve({key: value}, {})
