"""A round of 48 layers in each dispatch mode, misses through the link, and swaps beside rounds.

The model has random weights and the 30B-A3B shape; every byte of a real round is read. Nothing
here is an engine: it measures what launches, waits and swaps cost.

Run: python tests/device/rounds.py [--out FOLDER] [--binaries FOLDER] [--layers N]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from hostloop import await_word, driver, loops
from lab import EXPERTS, LAYERS, Report, capture, event_times, mapped, spread
from round_model import NODES, Model


class Rounds:
    """Graphs of every mode and the compiled loops that run them."""

    def __init__(self, model):
        import cupy as cp

        self.model, self.number = model, 0
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.driver = driver()
        self.steps, self.bell = loops(self.driver.cuGraphLaunch)
        self.cell = np.zeros(2, np.int64)
        cp.cuda.Device().synchronize()
        with self.stream:
            model.round("")  # every kernel loaded and run once before anything is captured
        self.stream.synchronize()
        model.set_state(0, 0)
        self._keep = []
        self.graphs = {
            "device": [self._capture(lambda: model.round(""))],
            "device, early starts": [self._capture(lambda: model.round("", early=True))],
            "doorbell": [self._capture(lambda: model.round("doorbell"))],
            "doorbell, early starts": [self._capture(lambda: model.round("doorbell", True))],
        }
        self.graphs["stepped"] = [
            self._capture(lambda i=i: self._segment(i)) for i in range(model.layers + 1)
        ]
        self.values = None
        model.early(True)
        self.graphs["stepped, early starts"] = [
            self._capture(lambda i=i: self._segment(i)) for i in range(model.layers + 1)
        ]
        model.early(False)
        try:
            self.graphs["doorbell, stream wait"] = [self._capture(self._with_value_waits)]
        except RuntimeError as error:
            self.values = str(error)

    def _capture(self, body):
        with self.stream:
            self.stream.begin_capture()
            try:
                body()
            finally:
                graph = self.stream.end_capture()
        self._keep.append(graph)
        return graph

    def _segment(self, i):
        if i == 0:
            self.model.begin()
        if i < self.model.layers:
            self.model.body(i, "stepped")
        else:
            self.model.end()

    def _with_value_waits(self):
        model = self.model
        model.begin()
        for i in range(model.layers):
            for node in model.nodes():
                node(i, "stepped")
            alias = model.answer_alias + i * 64
            code = self.driver.cuStreamWaitValue32_v2(self.stream.ptr, alias, 1, 0)
            if code:
                raise RuntimeError(f"cuStreamWaitValue32 while capturing: error {code}")
        model.end()

    def run(self, mode, rounds, stop=1 << 30, work=0):
        """int64 [rounds, 2]: nanoseconds of each round, and of its launch calls.

        `work`: nanoseconds that a CPU lane would take a layer; `stop`: the layer from which on no
        doorbell is answered.
        """
        model, out = self.model, np.zeros((rounds, 2), np.int64)
        graphs = np.array([g.graphExec for g in self.graphs[mode]], np.uint64)
        first, stream = self.number + 1, np.uint64(self.stream.ptr)
        common = (model.done, first, rounds, out, self.cell)
        if not mode.startswith("doorbell"):
            code = self.steps(graphs, stream, model.lines, work, *common)
        else:
            fixed = mode.endswith("stream wait")
            tail = (model.lines, work, model.answers, model.layers, fixed, stop)
            code = self.bell(graphs[0], stream, *tail, *common)
        self.number += rounds
        if code:
            raise RuntimeError(f"{mode}: the loop stopped with {code}")
        return out


class Busy:
    """Keeps the link busy from a second stream: graphs of copies, enqueued ahead."""

    def __init__(self, model, copies=512):
        import cupy as cp
        from cupy.cuda import runtime

        self.stream = cp.cuda.Stream(non_blocking=True)
        self.into = cp.empty((4, model.size), cp.uint8)

        def body():
            for i in range(copies):
                source = model.pool.alias + i % 512 * model.size
                to = self.into[i % 4].data.ptr
                runtime.memcpyAsync(to, source, model.size, 1, self.stream.ptr)

        self.graph = capture(self.stream, body)
        ms = event_times(self.stream, lambda: self.graph.launch(self.stream), 3)
        self.seconds = float(np.median(ms)) * 1e-3
        self.rate = copies * model.size / self.seconds / 1e9

    def fill(self, seconds):
        for _ in range(int(seconds / self.seconds) + 1):
            self.graph.launch(self.stream)


def on_cores(cores):
    """Every thread of this process on these cores."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def dispatch(rounds, out):
    columns = (
        "mode",
        "host cores",
        "link",
        "round ms median / p99",
        "launch calls us median / p99",
    )
    report = Report("dispatch", columns, out)
    busy = Busy(rounds.model)
    print(f"graph of copies: {busy.rate:.1f} GB/s", flush=True)
    everything = os.sched_getaffinity(0)
    for mode in rounds.graphs:
        rounds.run(mode, 10)
        for cores in (everything, set(sorted(everything)[:2])):
            on_cores(cores)
            for link in ("idle", "saturated"):
                if link == "saturated":
                    busy.fill(0.6)
                got = rounds.run(mode, 80)
                busy.stream.synchronize()
                ms, us = got[:, 0] * 1e-6, got[:, 1] * 1e-3
                report.add(mode, len(cores), link, spread(ms), spread(us))
    on_cores(everything)
    if rounds.values:
        print("stream wait values:", rounds.values)
    graph = rounds.graphs["device"][0]
    ms = event_times(rounds.stream, lambda: graph.launch(rounds.stream), 40)
    rounds.number += 40
    report.add("device, by events", "-", "idle", spread(ms), "-")
    by_python = []
    for _ in range(60):
        rounds.number += 1
        start = time.perf_counter()
        graph.launch(rounds.stream)
        launched = time.perf_counter()
        await_word(rounds.model.done, rounds.number, rounds.cell)
        by_python.append((time.perf_counter() - start, launched - start))
    ms, us = np.array(by_python).T * [[1e3], [1e6]]
    report.add("device, launched by CuPy", "-", "idle", spread(ms), spread(us))
    report.add("bytes of a round, GB", "-", "-", rounds.model.bytes() / 1e9, "-")


def with_lane(rounds, out):
    """The CPU lane takes a time per layer: what is left of it where GPU and CPU work at once."""
    columns = (
        "mode",
        "lane us a layer",
        "round ms median / p99",
        "above device + lane, us a layer",
    )
    report = Report("with-lane", columns, out)
    alone = np.median(rounds.run("device", 40)[:, 0])
    for mode in rounds.graphs:
        for work in (10_000, 20_000, 50_000, 150_000) if "device" not in mode else ():
            ns = rounds.run(mode, 40, work=work)[:, 0]
            over = (np.median(ns) - alone) / rounds.model.layers - work
            report.add(mode, work // 1000, spread(ns * 1e-6), over * 1e-3)


def same_results(rounds):
    """Every mode gives the same logits from the same start."""
    import cupy as cp

    model = rounds.model
    start, seen = model.x.copy(), {}
    for mode in rounds.graphs:
        model.x[:] = start
        cp.cuda.Device().synchronize()
        rounds.run(mode, 2)
        seen[mode] = model.last.get().tobytes()
    first = seen["device"]
    print("same bits:", {m: v == first for m, v in seen.items()}, flush=True)


def node_costs(rounds, out):
    """Each node's own cost: a graph of that node alone for every layer."""
    report = Report("nodes", ("node", "us a layer median / p99"), out)
    model = rounds.model
    for split in (False, True):
        model.split = split
        for name, node in zip(NODES, model.nodes(), strict=True):
            if not split and name not in ("gate_up", "down"):
                continue

            def body(node=node):
                for i in range(model.layers):
                    node(i, "")

            graph = capture(rounds.stream, body)
            ms = event_times(rounds.stream, lambda g=graph: g.launch(rounds.stream), 20)
            label = "" if split or name not in ("gate_up", "down") else " (h quantised in gate_up)"
            report.add(name + label, spread(ms * 1e3 / model.layers))


def bounded_waits(rounds, out):
    """The host falls silent in mid-round: the latch, the time it takes, the next rounds."""
    report = Report("bounded-waits", ("time-out ms", "round ms", "latched", "then stepped ms"), out)
    model = rounds.model
    for limit in (2, 20):
        model.set_state(2, limit * 1000)
        try:
            got = rounds.run("doorbell", 1, stop=20)
            took = got[0, 0] * 1e-6
        except RuntimeError as error:
            took = str(error)
        latched = int(model.words[(128 << 10) // 4 + 1])
        model.set_state(1, 0)
        after = rounds.run("stepped", 3)
        report.add(limit, took, latched, spread(after[:, 0] * 1e-6))


def misses(rounds, out):
    """Mode `device`, misses read by the kernels through mapped memory."""
    columns = ("share in host memory", "misses a round", "round ms median / p99", "miss GB/s")
    report = Report("device-misses", columns, out)
    model, rng = rounds.model, np.random.default_rng(5)
    for share in (0.1, 0.25, 0.5, 1.0):
        model.set_table(rng.random((model.layers, EXPERTS)) < share)
        counts = []
        for _ in range(10):
            # ids change with x; the stepped mode publishes them, so one of its rounds counts them
            rounds.run("stepped", 1)
            lines = model.words[: 16 * model.layers].reshape(-1, 16)[:, 1:9]
            picked = lines.astype(np.int64)
            counts.append(int(np.take_along_axis(model.in_host, picked, 1).sum()))
        timed = rounds.run("device", 20)[:, 0] * 1e-6
        rate = float(np.median(counts) * model.size / np.median(timed) / 1e6)
        report.add(share, float(np.median(counts)), spread(timed), rate)
    model.set_table(np.zeros((model.layers, EXPERTS), bool))


class Swapper:
    """96 experts on their way in, and out at the same time if asked, on streams of their own."""

    def __init__(self, model):
        import cupy as cp
        from cupy.cuda import runtime

        self.side = cp.cuda.Stream(non_blocking=True)
        self.other = cp.cuda.Stream(non_blocking=True)
        self._spare = cp.empty((96, model.size), cp.uint8)
        host, alias = mapped(96 * model.size)
        host[:] = 0

        def copies(stream, leave):
            for i in range(96):
                slot, place = self._spare[i].data.ptr, i * model.size
                if leave:
                    runtime.memcpyAsync(alias + place, slot, model.size, 2, stream.ptr)
                else:
                    source = model.pool.alias + place
                    runtime.memcpyAsync(slot, source, model.size, 1, stream.ptr)

        self._enter = capture(self.side, lambda: copies(self.side, False))
        self._leave = capture(self.other, lambda: copies(self.other, True))

    def start(self, both):
        """Enqueue 96 swaps; the two events around them."""
        import cupy as cp

        a, b = cp.cuda.Event(), cp.cuda.Event()
        a.record(self.side)
        if both:
            self.other.wait_event(a)
            self._leave.launch(self.other)
        self._enter.launch(self.side)
        if both:
            self.side.wait_event(self.other.record())
        b.record(self.side)
        return a, b


def swaps(rounds, out):
    """96 slots replaced on a side stream, every 4 rounds."""
    import cupy as cp
    from cupy.cuda import runtime

    columns = ("beside the rounds", "round ms median / p99", "96 swaps ms median / p99", "GB/s")
    report = Report("swaps", columns, out)
    model = rounds.model
    swapper = Swapper(model)
    pinned, where = mapped(model.table.nbytes)
    half = np.random.default_rng(6).random((model.layers, EXPERTS)) < 0.5
    for mode, in_host in (("device", half & False), ("stepped", half & False), ("device", half)):
        model.set_table(in_host)
        pinned[:] = model.table.get().view(np.uint8).reshape(-1)
        label = f"{mode}, half in host memory" if in_host.any() else mode
        for what in ("nothing", "enter", "enter and leave", "table update"):
            ms, swap = [], []
            for _ in range(20):
                if what == "table update":
                    table, size = model.table.data.ptr, model.table.nbytes
                    runtime.memcpyAsync(table, where, size, 1, rounds.stream.ptr)
                events = swapper.start(what != "enter") if what.startswith("enter") else None
                ms += list(rounds.run(mode, 4)[:, 0] * 1e-6)
                if events:
                    events[1].synchronize()
                    swap.append(cp.cuda.get_elapsed_time(*events))
            rate = 96 * model.size / (np.median(swap) * 1e6) if swap else 0.0
            report.add(f"{label}: {what}", spread(ms), spread(swap) if swap else "-", rate)
    model.set_table(half & False)


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out")
    ap.add_argument("--binaries")
    ap.add_argument("--layers", type=int, default=LAYERS)
    a = ap.parse_args()
    model = Model(a.layers, a.binaries)
    rounds = Rounds(model)
    same_results(rounds)
    dispatch(rounds, a.out)
    with_lane(rounds, a.out)
    node_costs(rounds, a.out)
    misses(rounds, a.out)
    swaps(rounds, a.out)
    bounded_waits(rounds, a.out)


if __name__ == "__main__":
    main()
