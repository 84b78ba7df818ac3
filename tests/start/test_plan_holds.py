"""What `strata plan` says about devices is what a start then takes."""

from __future__ import annotations

import pytest

from strata_core import api

MIB = 1 << 20


@pytest.mark.parametrize(
    ("vram", "options"),
    [
        (0.02, {}),
        (0.008, {}),
        (0.008, {"source": "sliced-pinned"}),
        (0.008, {"expert_cache": 30, "max_context": 700}),
        (0.008, {"sim_devices": 2, "expert_cache_device1": "auto", "kv": "int8"}),
    ],
)
def test_a_start_takes_what_was_planned(vram, options, run) -> None:
    planned = api.make_plan("demo", backend="sim", sim_vram=vram, **options).plan
    outcome = run(sim_vram=vram, **options)
    assert (outcome.error, outcome.left()) == (None, [])
    ledger = outcome.backends[0].ledger
    for tier in planned.tiers:
        if tier.name.startswith("vram") or tier.name == "pinned":
            # pools are rounded up to pages and to the device's alignment
            assert ledger.peak(tier.name) == pytest.approx(tier.need, rel=0.03, abs=MIB // 8)
