"""How misses are split between the link and the CPU: the table, and what is measured for it."""

import itertools
import logging

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.interfaces import Span
from strata_core.kernels.device.split import Lane, Split, by_lanes, by_share
from strata_core.memory.host import HostAllocator
from strata_core.sources.arena import Arena
from strata_core.testing.sim import SimFaults

LANES = st.builds(Lane, st.floats(0, 1e-3), st.floats(1e8, 1e12))


class Pinned(HostAllocator):
    """Memory that a runtime registers, so that devices have aliases."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime

    def reserve(self, nbytes, cuts, purpose):
        region = super().reserve(nbytes, cuts, purpose)
        self.runtime.register(region.address, -(-nbytes // 4096) * 4096)
        alias = self.runtime.alias(region.address, 0)
        return evolve(region, spans=(Span(region.address, nbytes, alias, pinned=True),))

    def release(self, region):
        self.runtime.unregister(region.address)
        super().release(region)


@given(st.integers(0, 64), st.floats(0, 1))
def test_a_fixed_share_is_rounded(most, share):
    table = by_share(most, share)
    assert table.dtype == np.int32
    assert all(0 <= s <= m and abs(s - share * m) <= 0.5 for m, s in enumerate(table.tolist()))


@given(st.integers(0, 32), st.integers(1, 1 << 24), LANES, LANES)
def test_no_other_split_ends_earlier(most, nbytes, link, cpu):
    table = by_lanes(most, nbytes, link, cpu).tolist()

    def end(misses, taken):
        return max(link.seconds(taken * nbytes), cpu.seconds((misses - taken) * nbytes))

    for misses, taken in enumerate(table):
        ends = [end(misses, other) for other in range(misses + 1)]
        assert ends[taken] == min(ends)
        assert all(later > min(ends) for later in ends[taken + 1 :]), "ties go to the link"
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(table))


def test_the_reference_machines_split():
    """Eight misses of 2.65 MB, link 52 GB/s after 8 us, CPU 80 GB/s after 10 us: three on it."""
    table = by_lanes(8, 2_650_000, Lane(8e-6, 52e9), Lane(10e-6, 80e9))
    assert (table[2], table[8]) == (1, 3)
    split = Split(table=table, asked="auto", link=Lane(8e-6, 52e9), cpu=Lane(10e-6, 80e9))
    assert split.as_json(2) == {
        "pcie_frac": "auto",
        "table": table[:3].tolist(),
        "corrections": 0,
        "rates": {
            "link": {"gb_s": 52.0, "start_us": 8.0},
            "cpu": {"gb_s": 80.0, "start_us": 10.0},
        },
    }


def test_all_goes_over_the_link_up_to_a_number():
    split = Split(table=np.array([0, 1, 2, 2], np.int32), asked="auto")
    assert [split.takes_all(m) for m in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("link", [1e3, 1e15])
def test_auto_goes_by_the_rates(lab, tiny_file, caplog, link):
    checkpoint = tiny_file()
    runtime = lab.runtime(link=link)
    backend = lab.backend(runtime, expert_cache=3)
    backend.open_contexts()
    source = Arena(checkpoint.experts, Pinned(runtime), lab.quiet())
    with caplog.at_level(logging.INFO, "strata.device"):
        executor = lab.bind(backend, checkpoint, source)
    for size in (1, 5):
        assert lab.logits(executor, size=size).tobytes() == lab.cpu(checkpoint).tobytes()
    lanes, counters = executor.lanes(), executor.counters()
    assert lanes["pcie_frac"] == "auto"
    assert lanes["rates"]["link"]["gb_s"] == round(link / 1e9, 2)
    assert lanes["rates"]["cpu"]["gb_s"] > 0
    assert (counters["pcie"]["experts"] > 0) == (link > 1e12)
    assert (counters["cpu"]["experts"] > 0) == (link < 1e12)
    assert "the link moves" in caplog.text
    assert sum(lane["experts"] for lane in counters.values()) == 2 * 24 * 2 * 2
    executor.close()
    source.close()
    lab.check_closed(backend)


class Unstated:
    """A runtime that says nothing of its link."""

    def __init__(self, runtime):
        self._runtime = runtime

    def wait_clock(self, device):
        return self._runtime.wait_clock(device)

    def __getattr__(self, name):
        if name == "link_rate":
            raise AttributeError(name)
        return getattr(self._runtime, name)


@pytest.mark.parametrize("refused", [None, "alloc", "copy"])
def test_a_link_that_nobody_states_is_measured(lab, tiny_file, refused):
    checkpoint = tiny_file()
    runtime = lab.runtime()
    backend = lab.backend(Unstated(runtime), expert_cache=3)
    backend.open_contexts()
    source = Arena(checkpoint.experts, Pinned(runtime), lab.quiet())
    split = backend._split

    def fails(placement, *more):
        if refused:
            next_call = runtime.calls().get(refused, 0) + 1
            runtime.faults = SimFaults({refused: next_call})
        try:
            return split(placement, *more)
        finally:
            runtime.faults = SimFaults()

    backend._split = fails
    executor = lab.bind(backend, checkpoint, source)
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    told = [item.what for item in lab.degradations if "no device holds" in item.what]
    assert len(told) == (refused is not None)
    assert set(executor.lanes()["rates"]) == (set() if refused else {"link", "cpu"})
    assert (executor.counters()["cpu"]["experts"] > 0) or not refused
    executor.close()
    source.close()
    lab.check_closed(backend)


def test_nothing_is_measured_where_nothing_has_an_alias(lab, tiny_file):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=3)
    executor = lab.bind(backend, checkpoint)
    lanes = executor.lanes()
    assert lanes["rates"] == {}
    assert not any(lanes["table"])
    lab.check_closed(backend, executor)
