"""Exact expert rows: are they right, and how fast from VRAM, mapped memory and by DMA.

Run: python tests/device/expert_rows.py [--out FOLDER] [--binaries FOLDER]
"""

from __future__ import annotations

import argparse

import numpy as np
from lab import HIDDEN, INNER, LAYERS, TOP, Module, Report, capture, event_times, mapped, spread
from oracle import BLOCK_BYTES, expert, product, random_rows

KINDS = ("Q4K", "Q80", "MX4")
WINDOWS = {"mapped, matrix units": 32, "mapped, matrix units, rows unpadded": 0}
"""Ways to read a window of 8 tokens through mapped memory, and the padding of a staged row."""


def blob_bytes(kind):
    return 3 * HIDDEN * INNER // 32 * BLOCK_BYTES[kind]


def row_bytes(kind, columns):
    return columns // 32 * BLOCK_BYTES[kind]


def random_blob(kind, rng):
    return np.concatenate(
        [
            random_rows(kind, 2 * INNER, HIDDEN, rng).reshape(-1),
            random_rows(kind, HIDDEN, INNER, rng).reshape(-1),
        ]
    )


class Buffers:
    """Activations and results for `top` experts and up to 8 tokens."""

    def __init__(self, rng, top=TOP):
        import cupy as cp

        self.x_host = rng.standard_normal((8, HIDDEN)).astype(np.float32)
        self.x = cp.asarray(self.x_host)
        self.q = cp.zeros(8 * HIDDEN * 2, cp.uint8)
        self.s = cp.zeros((8 * HIDDEN // 32, 2), cp.float32)
        self.hq = cp.zeros(top * 8 * INNER * 2, cp.uint8)
        self.hs = cp.zeros((top * 8 * INNER // 32, 2), cp.float32)
        self.h = cp.zeros((top, INNER), cp.float32)
        self.y = cp.zeros((top, 8, HIDDEN), cp.float32)


def quantise(mod, b, kind, planes, tokens, fragments=False):
    name = f"quantise{'_fragment' if fragments else ''}_p{planes}"
    tail = () if fragments else (np.int32(kind == "MX4"),)
    mod(name, (HIDDEN // 256, tokens), (256,), (b.x, b.q, b.s, np.int32(HIDDEN), *tail))


def expert_pass(mod, b, kind, planes, tokens, table, ids, direct=False):
    """gate_up and down of len(ids) experts for `tokens` tokens; rows land in b.y."""
    wide, narrow = row_bytes(kind, HIDDEN), row_bytes(kind, INNER)
    skip = np.uint64(2 * INNER * wide)
    n, k, f = len(ids), np.int32(HIDDEN), np.int32(INNER)
    up = f"gate_up_{'direct_' if direct else ''}{kind}_p{planes}_t{tokens}"
    shared = 0 if direct else 64 * wide + 32
    mod(up, (INNER // 32, n), (256,), (table, ids, b.q, b.s, b.hq, b.hs, k, f), shared)
    shared = 64 * narrow + 32
    args = (table, ids, b.hq, b.hs, b.y, f, k, skip)
    mod(f"down_{kind}_p{planes}_t{tokens}", (HIDDEN // 64, n), (256,), args, shared)


def split_pass(mod, b, kind, table, ids):
    """One token, two planes, h handed over as floats and quantised by `down`."""
    wide, narrow = row_bytes(kind, HIDDEN), row_bytes(kind, INNER)
    n, k, f = len(ids), np.int32(HIDDEN), np.int32(INNER)
    args = (table, ids, b.q, b.s, b.h, k, f)
    mod(f"gate_up_h_{kind}_p2", (INNER // 16, n), (128,), args, 32 * wide + 32)
    args = (table, ids, b.h, b.y, f, k, np.uint64(2 * INNER * wide))
    shared = 64 * narrow + 32 + 2 * INNER + INNER // 32 * 8
    mod(f"down_h_{kind}_p2", (HIDDEN // 64, n), (256,), args, shared)


def window8_pass(mod, b, planes, table, ids, pad=32):
    """The same for a window of 8 tokens on matrix units (Q4_K)."""
    wide, narrow = row_bytes("Q4K", HIDDEN), row_bytes("Q4K", INNER)
    skip = np.uint64(2 * INNER * wide)
    n, k, f = len(ids), np.int32(HIDDEN), np.int32(INNER)
    args = (table, ids, b.q, b.s, b.hq, b.hs, k, f)
    mod(f"gate_up8_A4K_p{planes}", (INNER // 32, n), (256,), args, 64 * (wide + pad))
    args = (table, ids, b.hq, b.hs, b.y, f, k, skip)
    mod(f"down8_A4K_p{planes}", (HIDDEN // 64, n), (256,), args, 64 * (narrow + pad))


def same(a, b):
    return bool(np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)))


def check(rows, matrix, kind, planes, seed=0):
    """Names of the variants whose bits differ from the oracle's; two experts, 8 tokens."""
    import cupy as cp

    rng = np.random.default_rng(seed)
    b = Buffers(rng)
    blobs = [random_blob(kind, rng) for _ in range(2)]
    held = cp.asarray(np.stack(blobs))
    table = cp.asarray(np.array([held[i].data.ptr for i in range(2)], np.uint64))
    ids = cp.asarray(np.array([1, 0], np.int32))
    tokens = (0, 1, 5)
    want = {
        (k, t): expert(kind, blobs[1 - k], b.x_host[t], planes, HIDDEN, INNER)
        for k in range(2)
        for t in tokens
    }
    wrong = []

    def compare(name, count):
        y = b.y.get().reshape(-1)[: 2 * count * HIDDEN].reshape(2, count, HIDDEN)
        b.y[:] = np.nan
        bad = [kt for kt in want if kt[1] < count and not same(y[kt[0], kt[1]], want[kt])]
        if bad:
            worst = max(float(np.abs(y[k, t] - want[k, t]).max()) for k, t in bad)
            wrong.append(f"{name} (experts, tokens {bad}, off by {worst:.3g})")

    for count in (1, 4, 8):
        quantise(rows, b, kind, planes, count)
        expert_pass(rows, b, kind, planes, count, table, ids)
        compare(f"{kind} planes {planes} tokens {count}", count)
    if planes == 2:
        quantise(rows, b, kind, planes, 1)
        split_pass(rows, b, kind, table, ids)
        compare(f"{kind} planes {planes} h as floats", 1)
    if kind == "Q4K":
        quantise(rows, b, kind, planes, 1)
        expert_pass(rows, b, kind, planes, 1, table, ids, direct=True)
        compare(f"{kind} planes {planes} in place", 1)
        quantise(rows, b, kind, planes, 8, fragments=True)
        window8_pass(matrix, b, planes, table, ids)
        compare(f"{kind} planes {planes} matrix units, 8 tokens", 8)
    return wrong


def check_dense(rows, planes=2, seed=1):
    """As `check`, for the dense Q8_0 rows of one matrix."""
    import cupy as cp

    rng = np.random.default_rng(seed)
    b = Buffers(rng)
    raw = random_rows("Q80", 64, HIDDEN, rng)
    w, y = cp.asarray(raw), cp.zeros(64, cp.float32)
    quantise(rows, b, "Q80", planes, 1)
    args = (w, b.q, b.s, y, np.uint64(0), np.int32(HIDDEN), np.int32(64))
    rows(f"dense_Q80_p{planes}_t1", (4,), (128,), args, 16 * (row_bytes("Q80", HIDDEN) + 16) + 32)
    good = same(y.get(), product("Q80", raw, b.x_host[0], planes))
    return [] if good else [f"dense Q80 planes {planes}"]


class Pool:
    """`count` random blobs in VRAM and in mapped memory, and tables of their addresses."""

    def __init__(self, kind, count, rng):
        import cupy as cp

        size = blob_bytes(kind)
        self.size, self.count = size, count
        self.host, self.alias = mapped(size * count)
        block = {"Q4K": 144, "Q80": 34, "MX4": 17}[kind]
        one = random_blob(kind, rng).reshape(-1, block)
        view = self.host.reshape(count, -1, block)
        for i in range(count):
            view[i] = np.roll(one, i * 97, 0)
        self.vram = cp.asarray(self.host).reshape(count, size)
        where = np.arange(count, dtype=np.uint64) * np.uint64(size)
        self.in_vram = cp.asarray(where + np.uint64(self.vram.data.ptr))
        self.in_host = cp.asarray(where + np.uint64(self.alias))


def time_passes(stream, work, nbytes, times):
    graph = capture(stream, work)
    ms = event_times(stream, lambda: graph.launch(stream), times)
    return nbytes / (ms * 1e-3) / 1e9


def measure_vram(rows, matrix, pool, b, kind, stream, report, rng):
    import cupy as cp

    for top, layers, label in ((TOP, LAYERS, "8 a launch"), (64, 6, "64 a launch")):
        sets = [
            cp.asarray(rng.permutation(pool.count)[:top].astype(np.int32)) for _ in range(layers)
        ]
        variants = [("staged", p, t) for p in (1, 2) for t in (1, 4, 8)]
        variants += [("h as floats", 2, 1)]
        variants += [("in place", p, 1) for p in (1, 2) if kind == "Q4K"]
        variants += [("matrix units", p, 8) for p in (1, 2) if kind == "Q4K"]
        for how, planes, tokens in variants:
            with stream:
                quantise(rows, b, kind, planes, tokens, fragments=how == "matrix units")

            def work(how=how, planes=planes, tokens=tokens, sets=sets):
                for ids in sets:
                    if how == "matrix units":
                        window8_pass(matrix, b, planes, pool.in_vram, ids)
                    elif how == "h as floats":
                        split_pass(rows, b, kind, pool.in_vram, ids)
                    else:
                        direct = how == "in place"
                        expert_pass(rows, b, kind, planes, tokens, pool.in_vram, ids, direct)

            rate = time_passes(stream, work, pool.size * top * layers, 12)
            report.add(kind, f"VRAM, {label}", how, planes, tokens, spread(rate))


def measure_host(rows, matrices, pool, b, kind, stream, report, rng):
    import cupy as cp
    from cupy.cuda import runtime

    slots = cp.empty((TOP, pool.size), cp.uint8)
    at_slots = cp.asarray(np.array([slots[i].data.ptr for i in range(TOP)], np.uint64))
    first = cp.arange(TOP, dtype=cp.int32)
    hows = ["mapped, staged", "mapped, h as floats", "DMA then staged"]
    hows += ["mapped, in place", *WINDOWS] if kind == "Q4K" else []
    for tokens in (1, 4, 8):
        for top in (1, 2, 4, 8):
            if tokens > 1 and top != 8:
                continue
            for how in hows:
                if tokens > 1 and how in ("mapped, in place", "mapped, h as floats"):
                    continue
                if how in WINDOWS and tokens != 8:
                    continue
                with stream:
                    quantise(rows, b, kind, 2, tokens, fragments=how in WINDOWS)
                picks = [rng.permutation(pool.count)[:top].astype(np.int32) for _ in range(8)]
                device = [cp.asarray(p) for p in picks]

                def work(how=how, top=top, tokens=tokens, picks=picks, device=device):
                    for ids, here in zip(device, picks, strict=True):
                        if how in WINDOWS:
                            pad = WINDOWS[how]
                            window8_pass(matrices[pad], b, 2, pool.in_host, ids, pad)
                            continue
                        if how == "mapped, h as floats":
                            split_pass(rows, b, kind, pool.in_host, ids)
                            continue
                        if how != "DMA then staged":
                            direct = how == "mapped, in place"
                            expert_pass(rows, b, kind, 2, tokens, pool.in_host, ids, direct)
                            continue
                        for i, e in enumerate(here):
                            runtime.memcpyAsync(
                                slots[i].data.ptr,
                                pool.alias + int(e) * pool.size,
                                pool.size,
                                runtime.memcpyHostToDevice,
                                stream.ptr,
                            )
                        expert_pass(rows, b, kind, 2, tokens, at_slots, first[:top])

                rate = time_passes(stream, work, pool.size * top * 8, 10)
                report.add(kind, f"host, {top} a launch", how, 2, tokens, spread(rate))


def main():
    import cupy as cp

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out")
    ap.add_argument("--binaries")
    ap.add_argument("--check-only", action="store_true")
    ap.add_argument("--kinds", nargs="*", default=KINDS)
    a = ap.parse_args()
    rows = Module("rows.cu", binaries=a.binaries)
    matrices = {
        pad: Module("matrix.cu", (f"MATRIX_PAD={pad}",), a.binaries) for pad in WINDOWS.values()
    }
    matrix = matrices[32]
    for kind in a.kinds:
        for planes in (1, 2):
            wrong = check(rows, matrix, kind, planes)
            print(f"exact {kind} planes {planes}:", wrong or "all bits equal", flush=True)
    print("exact dense:", check_dense(rows) or "all bits equal", flush=True)
    if a.check_only:
        return
    report = Report(
        "expert-rows", ("type", "from", "how", "planes", "tokens", "GB/s median / p99"), a.out
    )
    for kind in a.kinds:
        rng = np.random.default_rng(2)
        pool = Pool(kind, 256, rng)
        b = Buffers(rng, 64)
        stream = cp.cuda.Stream(non_blocking=True)
        measure_vram(rows, matrix, pool, b, kind, stream, report, rng)
        measure_host(rows, matrices, pool, b, kind, stream, report, rng)


if __name__ == "__main__":
    main()
