"""A model of random weights in the 30B-A3B shape, as far as launches, waits and bytes need it."""

from __future__ import annotations

import numpy as np
from expert_rows import Pool, row_bytes
from lab import EXPERTS, HIDDEN, INNER, TOP, Module, mapped
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
        shared = 16 * row_bytes("Q80", HIDDEN) + 32
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
        shared = 16 * row_bytes("Q80", HEADS) + 32
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
        shared = 16 * row_bytes("Q80", HIDDEN) + 32
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
