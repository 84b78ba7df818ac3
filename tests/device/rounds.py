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
from expert_rows import Pool, row_bytes
from hostloop import await_word, driver, loops
from lab import (
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    TOP,
    Module,
    Report,
    capture,
    event_times,
    mapped,
    spread,
)
from oracle import random_rows

VOCABULARY, QKV, HEADS, CONTEXT, SPLITS = 32000, 5120, 4096, 1024, 2
NODES = (
    "combine_norm",
    "qkv",
    "heads",
    "attention",
    "attention_fold",
    "output",
    "norm",
    "router",
    "top8",
    "gate_up",
    "down",
)


class Model:
    """Weights, buffers and one launch function a node."""

    def __init__(self, layers, binaries):
        import cupy as cp

        self.layers, self.split = layers, True
        self.rows, self.layer = Module("rows.cu", (), binaries), Module("layer.cu", (), binaries)
        rng = np.random.default_rng(0)
        self.pool = Pool("Q4K", 512, rng)
        self.size = self.pool.size
        self.slots = cp.empty((layers * EXPERTS, self.size), cp.uint8)
        for i in range(0, layers * EXPERTS, 512):
            part = self.slots[i : i + 512]
            part[:] = self.pool.vram[: len(part)]
        self.set_table(np.zeros((layers, EXPERTS), bool))
        qkv, out = row_bytes("Q80", HIDDEN) * QKV, row_bytes("Q80", HEADS) * HIDDEN
        one = cp.asarray(random_rows("Q80", 1, (qkv + out) // 34 * 32, rng).reshape(-1))
        self.dense = cp.concatenate([cp.roll(one, 34 * 1000 * i) for i in range(layers)])
        self.dense = self.dense.reshape(layers, qkv + out)
        self.qkv_bytes = qkv
        self.head = cp.asarray(random_rows("Q80", VOCABULARY, HIDDEN, rng))
        routers = rng.standard_normal((layers, EXPERTS, HIDDEN)).astype(np.float32) / 22
        self.router = cp.asarray(routers)
        self.gain = cp.ones(HIDDEN, cp.float32)
        self.rope = cp.asarray(rng.uniform(-0.7, 0.7, (CONTEXT, 128)).astype(np.float32))
        self._buffers(cp, rng)

    def _buffers(self, cp, rng):
        f, b = cp.float32, cp.uint8
        self.x = cp.asarray(rng.standard_normal(HIDDEN).astype(f))
        self.result, self.weights = cp.zeros((TOP, HIDDEN), f), cp.zeros(TOP, f)
        self.ids, self.normed = cp.zeros(TOP, cp.int32), cp.zeros(HIDDEN, f)
        self.q, self.s = cp.zeros(HIDDEN * 2, b), cp.zeros((HIDDEN // 32, 2), f)
        self.qkv, self.query = cp.zeros(QKV, f), cp.zeros(HEADS, f)
        self.kc = cp.zeros((self.layers, CONTEXT, 512), cp.uint16)
        self.vc = cp.zeros((self.layers, CONTEXT, 512), cp.uint16)
        self.part = cp.zeros((32, SPLITS, 130), f)
        self.oq, self.os = cp.zeros(HEADS * 2, b), cp.zeros((HEADS // 32, 2), f)
        self.logits, self.last = cp.zeros(EXPERTS, f), cp.zeros(VOCABULARY, f)
        self.hq, self.h = cp.zeros(TOP * INNER * 2, b), cp.zeros((TOP, INNER), f)
        self.hs = cp.zeros((TOP * INNER // 32, 2), f)
        self.state = cp.asarray(np.array([0, 0, 20_000, 400], np.uint32))
        self.mail, alias = mapped(1 << 20)
        self.mail[:] = 0
        self.words = self.mail.view(np.uint32)
        base = self.mail.ctypes.data
        self.lines, self.answers, self.done = base, base + (64 << 10), base + (128 << 10)
        self.line_alias, self.answer_alias = alias, alias + (64 << 10)
        self.done_alias, self.activation_alias = alias + (128 << 10), alias + (256 << 10)

    def set_state(self, index, value):
        """Write one word of the state while no round runs."""
        import cupy as cp

        self.state[index] = value
        cp.cuda.Device().synchronize()

    def set_table(self, in_host):
        """Experts where `in_host` [layers, experts] is set are read through mapped memory."""
        import cupy as cp

        index = np.arange(self.layers * EXPERTS, dtype=np.uint64).reshape(self.layers, -1)
        size = np.uint64(self.size)
        vram = np.uint64(self.slots.data.ptr) + index * size
        host = np.uint64(self.pool.alias) + (index * np.uint64(7) % np.uint64(512)) * size
        table = np.where(in_host, host, vram)
        if hasattr(self, "table"):
            self.table[:] = cp.asarray(table)
        else:
            self.table = cp.asarray(table)
        self.in_host = in_host
        cp.cuda.Device().synchronize()

    # Node launchers: `i` is the layer, `mode` what of the doorbell a node takes part in.
    def combine_norm(self, i, mode=""):
        wait = self.answer_alias + (i - 1) * 64 if mode == "doorbell" and i else 0
        rows = self.result.data.ptr if i else 0
        self._norm(rows, wait, 0)

    def norm(self, i, mode=""):
        post = self.activation_alias + i * 8192 if mode in ("doorbell", "stepped") else 0
        self._norm(0, 0, post)

    def _norm(self, rows, wait, post):
        u = np.uint64
        args = (self.x, u(rows), self.weights, self.gain, self.normed, self.q, self.s)
        self.layer(
            "combine_norm", (1,), (1024,), (*args, u(post), u(wait), self.state, np.int32(HIDDEN))
        )

    def qkv_rows(self, i, mode=""):
        args = (self.dense[i], self.q, self.s, self.qkv, np.uint64(0))
        shared = 16 * (row_bytes("Q80", HIDDEN) + 16) + 32
        tail = (np.int32(HIDDEN), np.int32(QKV))
        self.rows("dense_Q80_p2_t1", (QKV // 16,), (128,), (*args, *tail), shared)

    def heads(self, i, mode=""):
        args = (self.qkv, self.rope, self.query, self.kc[i], self.vc[i], self.state)
        self.layer("heads", (40,), (128,), args)

    def attention(self, i, mode=""):
        args = (self.query, self.kc[i], self.vc[i], self.part, self.state)
        self.layer("attention", (32, SPLITS), (256,), args)

    def attention_fold(self, i, mode=""):
        self.layer("attention_fold", (32,), (128,), (self.part, np.int32(SPLITS), self.oq, self.os))

    def output(self, i, mode=""):
        args = (self.dense[i, self.qkv_bytes :], self.oq, self.os, self.x, self.x)
        shared = 16 * (row_bytes("Q80", HEADS) + 16) + 32
        tail = (np.int32(HEADS), np.int32(HIDDEN))
        self.rows("dense_Q80_p2_t1", (HIDDEN // 16,), (128,), (*args, *tail), shared)

    def router_rows(self, i, mode=""):
        args = (self.normed, self.router[i], self.logits, np.int32(HIDDEN))
        self.layer("router", (EXPERTS // 4,), (128,), args)

    def top8(self, i, mode=""):
        line = self.line_alias + i * 64 if mode else 0
        args = (self.logits, self.ids, self.weights, np.uint64(line), self.state)
        self.layer("top8", (1,), (32,), args)

    def gate_up(self, i, mode=""):
        wide = row_bytes("Q4K", HIDDEN)
        k, f = np.int32(HIDDEN), np.int32(INNER)
        if self.split:
            args = (self.table[i], self.ids, self.q, self.s, self.h, k, f)
            self.rows("gate_up_h_Q4K_p2", (INNER // 16, TOP), (128,), args, 32 * wide + 32)
        else:
            args = (self.table[i], self.ids, self.q, self.s, self.hq, self.hs, k, f)
            self.rows("gate_up_Q4K_p2_t1", (INNER // 32, TOP), (256,), args, 64 * wide + 32)

    def down(self, i, mode=""):
        narrow = row_bytes("Q4K", INNER)
        skip = np.uint64(2 * INNER * row_bytes("Q4K", HIDDEN))
        tail = (np.int32(INNER), np.int32(HIDDEN), skip)
        shared = 64 * narrow + 32
        if self.split:
            args = (self.table[i], self.ids, self.h, self.result, *tail)
            more = 2 * INNER + INNER // 32 * 8
            self.rows("down_h_Q4K_p2", (HIDDEN // 64, TOP), (256,), args, shared + more)
        else:
            args = (self.table[i], self.ids, self.hq, self.hs, self.result, *tail)
            self.rows("down_Q4K_p2_t1", (HIDDEN // 64, TOP), (256,), args, shared)

    def early(self, on):
        """Whether kernels launched from now on may start before their predecessors end."""
        self.rows.early = self.layer.early = on

    def begin(self):
        self.layer("begin_round", (1,), (1,), (self.state,))

    def end(self, mode=""):
        self.combine_norm(self.layers, mode)
        args = (self.head, self.q, self.s, self.last, np.uint64(0))
        shared = 16 * (row_bytes("Q80", HIDDEN) + 16) + 32
        tail = (np.int32(HIDDEN), np.int32(VOCABULARY))
        self.rows("dense_Q80_p2_t1", (VOCABULARY // 16,), (128,), (*args, *tail), shared)
        self.layer("end_round", (1,), (1,), (self.state, np.uint64(self.done_alias)))

    def nodes(self):
        f = (self.combine_norm, self.qkv_rows, self.heads, self.attention, self.attention_fold)
        g = (self.output, self.norm, self.router_rows, self.top8, self.gate_up, self.down)
        return f + g

    def body(self, i, mode):
        for node in self.nodes():
            node(i, mode)

    def round(self, mode, early=False):
        self.begin()
        self.early(early)
        for i in range(self.layers):
            self.body(i, mode)
        self.end(mode)
        self.early(False)

    def bytes(self):
        """Bytes that a round with hits only reads: experts, dense weights, head, routers."""
        experts = self.layers * TOP * self.size
        dense = self.dense.nbytes + self.head.nbytes + self.router.nbytes
        return experts + dense


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


def swaps(rounds, out):
    """96 slots replaced on a side stream, every 4 rounds."""
    import cupy as cp
    from cupy.cuda import runtime

    columns = ("beside the rounds", "round ms median / p99", "96 swaps ms median / p99", "GB/s")
    report = Report("swaps", columns, out)
    model = rounds.model
    spare = cp.empty((96, model.size), cp.uint8)
    host, alias = mapped(96 * model.size)
    host[:] = 0
    side = cp.cuda.Stream(non_blocking=True)
    other = cp.cuda.Stream(non_blocking=True)

    def copies(stream, down):
        for i in range(96):
            to, source = spare[i].data.ptr, alias + i * model.size
            if down:
                runtime.memcpyAsync(source, to, model.size, 2, stream.ptr)
            else:
                runtime.memcpyAsync(
                    to, model.pool.alias + i * model.size, model.size, 1, stream.ptr
                )

    enter = capture(side, lambda: copies(side, False))
    leave = capture(other, lambda: copies(other, True))
    pinned, where = mapped(model.table.nbytes)
    half = np.random.default_rng(6).random((model.layers, EXPERTS)) < 0.5
    for mode, in_host in (("device", half & False), ("stepped", half & False), ("device", half)):
        model.set_table(in_host)
        table = model.table.get()
        pinned[:] = table.view(np.uint8).reshape(-1)
        label = f"{mode}, half in host memory" if in_host.any() else mode
        for what in ("nothing", "enter", "enter and leave", "table update"):
            ms, swap = [], []
            for _ in range(20):
                if what == "table update":
                    runtime.memcpyAsync(
                        model.table.data.ptr, where, table.nbytes, 1, rounds.stream.ptr
                    )
                a, b = cp.cuda.Event(), cp.cuda.Event()
                if what.startswith("enter"):
                    a.record(side)
                    if what != "enter":
                        other.wait_event(a)
                        leave.launch(other)
                    enter.launch(side)
                    if what != "enter":
                        side.wait_event(other.record())
                    b.record(side)
                ms += list(rounds.run(mode, 4)[:, 0] * 1e-6)
                if what.startswith("enter"):
                    b.synchronize()
                    swap.append(cp.cuda.get_elapsed_time(a, b))
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
