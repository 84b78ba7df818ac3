"""A lost device fails all that gives something back, too: the user sees what lost it."""

from __future__ import annotations

import logging

import pytest

from strata_core.engine.ending import closing
from strata_core.errors import EngineError, StrataError
from strata_core.testing.sim import SimFaults

CASES = {
    "a start's self-test": ({"launch": 2}, "testing the kernels of SIM0 failed: launch failed"),
    "a start's slots": ({"end_capture": 1}, "making the model's rounds failed: end_capture failed"),
    "a round": ({"graph_launcher": 5}, "a round stopped at "),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_that_of_the_loss(run, caplog, name) -> None:
    lose, what = CASES[name]
    with caplog.at_level(logging.WARNING, "strata"):
        end = run(hardware={"faults": SimFaults(lose=lose)}, expert_cache=4, adapt_every=0)
    assert end.error.what.startswith(what)
    assert "unspecified launch failure (error 719)" in end.error.why
    assert end.threads == []
    assert all(backend.runtime.closed for backend in end.backends)
    pools = {claim.pool for b in end.backends for claim in b.ledger.outstanding()}
    assert not [pool for pool in pools if pool.startswith("vram")]
    assert "closing failed as well" in caplog.text


def fails() -> None:
    raise EngineError("closing failed", "why", "what to do")


def test_closing_raises_where_nothing_else_went_wrong(caplog) -> None:
    with pytest.raises(EngineError, match="closing failed"):
        closing(fails)(None, None, None)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, "strata"):
        closing(fails)(StrataError, StrataError("the first"), None)
    assert "closing failed as well: closing failed (why)" in caplog.text


def test_what_nobody_foresaw_is_raised_all_the_same() -> None:
    with pytest.raises(ZeroDivisionError):
        closing(lambda: 1 // 0)(StrataError, StrataError("the first"), None)
