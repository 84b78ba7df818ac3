"""What a load proposes where a model does not fit, tried out: the flags that are named do fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--sim-vram", "0.02", "--prefill", "2048"), "--prefill"),
        (("--sim-vram", "0.01", "--expert-cache", "190", "--max-context", "512"), "--expert-cache"),
        (
            (
                *("--sim-devices", "2", "--sim-vram", "0.005"),
                *("--expert-cache", "0", "--expert-cache-device1", "100"),
            ),
            "--expert-cache-device1",
        ),
    ],
)
def test_what_is_proposed_fits(flags: tuple[str, ...], names: str, strata: Any) -> None:
    asked = ("plan", "demo", "--backend", "sim", "--json")
    result = strata(*asked, *flags)
    assert result.code == 1, result.err
    options = json.loads(result.out)["options"]
    assert any(names in option["flags"].split() for option in options)
    for option in options:
        words = option["flags"].split()
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        given |= dict(zip(words[::2], words[1::2], strict=True))
        again = strata(*asked, *(word for pair in given.items() for word in pair))
        assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--backend", "cpu", "--ram-budget", "0.1"), "--ram-budget"),
        (("--backend", "sim", "--sim-vram", "1", "--vram-budget", "0.001"), "--vram-budget"),
    ],
)
def test_a_budget_is_to_be_raised_to_what_is_enough(
    flags: tuple[str, ...], flag: str, strata: Any
) -> None:
    asked = ("generate", "demo", "In", "--max-tokens", "1", *flags[:-2])
    result = strata(*asked, *flags[-2:])
    assert result.code == 1
    found = re.search(rf"raise {flag} to ([0-9.]+)", result.err)
    assert found, result.err
    assert strata(*asked, flag, found[1]).code == 0
