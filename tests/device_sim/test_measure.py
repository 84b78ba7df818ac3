"""How the lanes are measured: both at once, rows that no cache holds, in bounded time."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_split import Pinned

from strata_core.kernels.device import measure
from strata_core.kernels.device.measure import CpuTrials, Sample, lanes_together, samples
from strata_core.kernels.device.split import by_lanes
from strata_core.sources.arena import Arena

BLOB = 2_650_000


class Machine:
    """Time that passes as the lanes' rates say: a runtime's copies, and a CPU's trials.

    `link` and `cpu` are the rates where both are at it, `alone` how much more each does by itself.
    """

    def __init__(self, monkeypatch, link, cpu, start, alone=1.5, launch=2e-6):
        self.now, self.link, self.cpu, self.start = 0.0, link, cpu, start
        self.alone, self.launch = alone, launch
        self.left, self.busy, self.marks, self.trials = [], 0.0, {}, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        part = SimpleNamespace(nbytes=BLOB)
        layout = SimpleNamespace(nbytes=BLOB, parts=(part,))
        self.over = [Sample(layer, layout, tuple(range(128))) for layer in range(12)]
        self.few, self.most, self.nbytes = 2, 8, BLOB

    # time

    def passes(self, seconds, busy):
        """Copies go on meanwhile."""
        end = self.now + seconds
        while self.left and self.now < end:
            rate = self.link * (1 if busy else self.alone)
            step = min(end - self.now, self.left[0][0] / rate)
            self.now += step
            self.left[0][0] -= step * rate
            if self.left[0][0] <= 1e-3:
                self.marks.update(dict.fromkeys(self.left.pop(0)[1], True))
        self.now = max(self.now, end)

    # the verbs that are used

    def create_event(self, device):
        return self.marks.setdefault(len(self.marks) + 1, True) and len(self.marks)

    def destroy_event(self, event):
        del self.marks[event]

    def copy(self, target, source, nbytes, stream):
        self.passes(self.launch, busy=False)
        self.left.append([float(nbytes), []])

    def record(self, event, stream):
        self.marks[event] = not self.left
        if self.left:
            self.left[-1][1].append(event)

    def finished(self, event):
        return self.marks[event]

    def synchronize(self, stream):
        while self.left:
            self.passes(1e-4, busy=False)

    def device(self, device, nbytes, purpose):
        return 1

    def release(self, address):
        pass

    # what a CPU's trials offer

    lane = CpuTrials.lane

    def places(self, layer, index):
        return [layer << 32 | index << 16]

    def wake(self):
        self.passes(5e-5, busy=False)

    def ready(self, count):
        def run():
            began, busy = self.now, bool(self.left)
            for _ in self.over:
                rate = self.cpu * (1 if busy else self.alone)
                self.passes(self.start + count * BLOB / rate, busy=True)
            self.trials.append((count, busy, bool(self.left)))
            return (self.now - began) / len(self.over)

        return run


@pytest.mark.parametrize(("link", "cpu"), [(50e9, 72e9), (11e9, 30e9), (25e9, 6e9)])
def test_rates_are_those_of_both_at_once(monkeypatch, link, cpu):
    machine = Machine(monkeypatch, link, cpu, 12e-6)
    found = lanes_together(machine, machine, 0, 1, machine)
    assert found.link.rate == pytest.approx(measure.KERNEL_SHARE * link, rel=0.05)
    assert found.cpu.rate == pytest.approx(cpu, rel=0.02)
    assert found.cpu.start == pytest.approx(12e-6, rel=0.1)
    counted = machine.trials[2:]
    assert all(before and after for _, before, after in counted), "the link was busy all along"
    assert {count for count, *_ in counted} == {2, 8}
    assert machine.marks == {}


def test_measured_alone_the_reference_machine_would_split_otherwise(monkeypatch):
    """What made 2 of 8 of it: 105.7 GB/s of the CPU alone, where 72 are left beside the link."""
    machine = Machine(monkeypatch, 48.3e9, 72e9, 10e-6)
    found = lanes_together(machine, machine, 0, 1, machine)
    assert by_lanes(8, BLOB, found.link, found.cpu)[8] == 3
    alone = measure.Lane(10e-6, 105.7e9)
    assert by_lanes(8, BLOB, found.link, alone)[8] == 2


@pytest.mark.parametrize("cpu", [72e9, 2e9])
def test_it_takes_about_a_tenth_of_a_second(monkeypatch, cpu):
    machine = Machine(monkeypatch, 50e9, cpu, 1e-5)
    lanes_together(machine, machine, 0, 1, machine)
    slow = machine.now - measure.LIMIT
    pair = 12 * 10 * BLOB / cpu
    assert slow < 0.03 + 6 * pair, "no pair is begun after the limit"


@given(st.integers(1, 20), st.integers(1, 10), st.integers(2, 6))
def test_trials_read_other_experts_each_time(count, top_k, layers):
    asked = []
    host = SimpleNamespace(
        trial=asked.append, try_out=lambda pool, trial: float(len(asked)), experts={}
    )
    layout = SimpleNamespace(nbytes=100)
    over = [Sample(n, layout, tuple(range(10 * n, 10 * n + count))) for n in range(layers)]
    cpu = CpuTrials(host, None, over, top_k)
    assert cpu.most == min(top_k, count)
    assert 1 <= cpu.few <= cpu.most
    for _ in range(3):
        cpu.ready(cpu.most)()
    for picks in asked:
        assert set(picks) == set(range(layers))
        for n, chosen in picks.items():
            assert len(set(chosen)) == cpu.most
            assert set(chosen) <= set(over[n].experts)
    if count >= 2 * cpu.most:
        assert not set(asked[0][0]) & set(asked[1][0])


def test_the_lane_s_own_phases_are_what_is_run(lab, tiny_file):
    """Nothing of it is counted, and rounds have the right bits afterwards."""
    checkpoint = tiny_file()
    runtime = lab.runtime()
    backend = lab.backend(runtime, expert_cache=3, threads=2)
    backend.open_contexts()
    source = Arena(checkpoint.experts, Pinned(runtime), lab.quiet())
    executor = lab.bind(backend, checkpoint, source)
    host, cells = executor._maker.host, executor._maker.cells
    cpu = CpuTrials(host, backend._pool, samples(cells, host), checkpoint.hyper.top_k)
    assert cpu.ready(cpu.most)() > 0
    assert all(not layer.served.any() for layer in host.experts.values())
    for sample in cpu.over:
        assert not cells.layers[sample.layer]["slot"][list(sample.experts), 0].any()
    assert lab.logits(executor, size=3).tobytes() == lab.cpu(checkpoint).tobytes()
    executor.close()
    source.close()
    lab.check_closed(backend)
