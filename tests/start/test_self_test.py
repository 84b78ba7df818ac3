"""Every device of a start computes golden rows, a late helper too, before anything lies on it."""

from __future__ import annotations

import logging
import re

import pytest

from strata_core.memory.ledger import Ledger


@pytest.mark.parametrize("early", [None, True])
def test_every_device_is_tested_before_it_holds_anything(run, caplog, monkeypatch, early) -> None:
    taken: list[tuple[str, str]] = []
    real = Ledger.take

    def take(self, pool, nbytes, purpose, **more):
        taken.append((pool, purpose))
        return real(self, pool, nbytes, purpose, **more)

    monkeypatch.setattr(Ledger, "take", take)
    helpers = {f"expert_cache_device{n}": 2 for n in (1, 2, 3)}
    with caplog.at_level(logging.DEBUG, "strata"):
        end = run(sim_devices=4, expert_cache=4, early_remote_contexts=early, **helpers)
    assert end.error is None
    told = re.findall(r"(SIM\d): self-test of \d+ kernels", caplog.text)
    assert told == ["SIM0", "SIM1", "SIM2", "SIM3"]
    for device in range(4):
        first = next(purpose for pool, purpose in taken if pool == f"vram{device}")
        assert first == "the self-test of its kernels"
    assert end.left() == []
