"""Every call of every verb that the chain makes, refused once: memory is had all the same."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import Bench

from strata_core.memory.address import bytes_at
from strata_core.memory.rules import COMPLEMENT

LAYER = 10 * 4096
SIZE = 6 * LAYER - 123
CUTS = [LAYER * i for i in range(6)]

MODES = {
    "by itself": {},
    "all": {"complement": "all"},
    "all, one refused": {"complement": "all", "refuse_one": True},
    "a budget": {"complement": "all", "pin_budget": 3 * LAYER},
    "a number": {"complement": 2 * LAYER + 4096},
    "none": {"complement": 0},
    "a prefix": {"partial": True, "partial_most": 2 * LAYER},
    "no alias": {"complement": "all", "aliases": "none"},
}
VERBS = ("host_alloc", "host_free", "register", "unregister", "alias", "take_error")


def run(mode: str, refuse: dict[str, int]) -> tuple[dict[str, int], bytes, Bench]:
    """One life of a region: its calls by verb, what its bytes were, and the machine."""
    bench = Bench(refuse=refuse, **MODES[mode])
    loan = bench.allocator.prepare(SIZE, CUTS, COMPLEMENT)
    loan.wait(0, SIZE)
    bytes_at(loan.address, SIZE)[:] = np.arange(SIZE) % 251
    region = loan.region()
    held = bytes_at(region.address, SIZE).tobytes()
    bench.allocator.release(region)
    calls = bench.runtime.calls()
    if "take_error" not in refuse:
        assert bench.runtime.take_error() is None
    bench.finish()
    return calls, held, bench


@pytest.mark.parametrize("mode", MODES)
def test_every_call_refused_once(mode: str, record_property) -> None:
    clean, expected, bench = run(mode, {})
    before = bench.degradations
    counts = {"calls": 0, "listed": 0}
    for verb in VERBS:
        for n in range(1, clean.get(verb, 0) + 1):
            calls, held, bench = run(mode, {verb: n})
            assert held == expected, f"{verb} {n}"
            assert calls[verb] >= n
            listed = bench.degradations != before
            counts["calls"] += 1
            counts["listed"] += listed
            # giving back is tried again, and a cleared error is asked for again: nothing is worse
            assert listed or verb in ("host_free", "unregister", "take_error"), f"{verb} {n}"
    record_property("refusals", counts)
    print(f"{mode}: {counts}")
