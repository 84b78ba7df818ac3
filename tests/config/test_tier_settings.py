"""The settings about the tiered file: what asks for it, what refuses it, and which place counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.config import resolve
from strata_core.errors import UsageError
from strata_core.setting_table import BY_KEY


def test_the_defaults_leave_it_to_the_planner() -> None:
    settings = resolve({}, {})
    assert (settings.source, settings.no_low_ram, settings.tier_verify) == ("auto", False, False)
    assert settings.expert_profile_save is None
    assert not any(BY_KEY[key].pending for key in ("low_ram", "no_low_ram", "tier_verify"))


def test_low_ram_is_the_source_tiered_file() -> None:
    settings = resolve({"low_ram": True}, {})
    assert (settings.source, settings.origin("source")) == ("tiered-file", "flag --low-ram")
    assert resolve({"low_ram": True, "source": "tiered-file"}, {}).source == "tiered-file"
    for other in ("mmap_experts", "resident_experts"):
        with pytest.raises(UsageError, match="contradicts the source"):
            resolve({"low_ram": True, other: True}, {})


@pytest.mark.parametrize("asked", [{"low_ram": True}, {"source": "tiered-file"}])
def test_one_place_cannot_ask_for_it_and_refuse_it(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({**asked, "no_low_ram": True}, {})
    assert caught.value.what.startswith("flag --no-low-ram contradicts flag --")
    assert caught.value.exit_code == 2
    assert resolve({"no_low_ram": True, "source": "mmap"}, {}).source == "mmap"


def test_a_place_that_counts_more_takes_back_what_another_asks() -> None:
    settings = resolve({"no_low_ram": True}, {"STRATA_LOW_RAM": "1"})
    assert (settings.source, settings.origin("source")) == ("auto", "default")
    settings = resolve({"low_ram": True}, {"STRATA_NO_LOW_RAM": "1"})
    assert (settings.source, settings.no_low_ram) == ("tiered-file", True)
    assert resolve({}, {"STRATA_LOW_RAM": "1"}).with_arguments({"no_low_ram": True}).source == (
        "auto"
    )
    again = resolve({"low_ram": True}, {"STRATA_NO_LOW_RAM": "1"}).with_arguments({"threads": 2})
    assert again.source == "tiered-file"


def test_verifying_is_a_variable_and_the_profile_a_file() -> None:
    assert BY_KEY["tier_verify"].flag is None
    assert resolve({}, {"STRATA_TIER_VERIFY": "1"}).tier_verify
    assert resolve({"expert_profile_save": "p.json"}, {}).expert_profile_save == Path("p.json")
