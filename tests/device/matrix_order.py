"""What ARITHMETIC's order costs on int8 matrix units: stripes against one ascending accumulator.

The product is a prompt's: 128 experts, 1536 rows of 2048, 256 tokens each. The stripe variant is
compared bit by bit with the window kernel of `rows.cu`.

Run: python tests/device/matrix_order.py [--out FOLDER] [--binaries FOLDER]
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from expert_rows import row_bytes, same
from lab import EXPERTS, HIDDEN, INNER, Module, Report, event_times
from oracle import product, random_rows

ROWS, TOKENS = 2 * INNER, 256
ORDERS = ("one ascending accumulator", "stripes and a fold", "no floats at all")
TILES = {"A4K": ("Q4K", 64, 128, 32), "A80": ("Q80", 32, 256, 16)}
"""Kernel's name of a type -> type, rows and tokens of a CTA, padding of a staged row."""


def gemm(mod, name, planes, order, buffers, experts):
    kind, m, n, pad = TILES[name]
    w, q, s, y = buffers
    shared = m * (row_bytes(kind, HIDDEN) + pad)
    grid = (ROWS // m, TOKENS // n, experts)
    args = (w, q, s, y, np.int32(HIDDEN), np.int32(ROWS), np.int32(TOKENS))
    mod(f"gemm_{name}_p{planes}_o{order}", grid, (256,), args, shared)


def main():
    import cupy as cp

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out")
    ap.add_argument("--binaries")
    a = ap.parse_args()
    rows = Module("rows.cu", binaries=a.binaries)
    modules = {c: Module("matrix.cu", (f"CTAS={c}",), a.binaries) for c in (1, 2)}
    rng = np.random.default_rng(0)
    x = cp.asarray(rng.standard_normal((EXPERTS * TOKENS, HIDDEN)).astype(np.float32))
    q = cp.zeros(x.size * 2, cp.uint8)
    s = cp.zeros((x.size // 32, 2), cp.float32)
    y = cp.zeros((EXPERTS, TOKENS, ROWS), cp.float32)
    stream = cp.cuda.Stream.null
    columns = ("type", "planes", "order", "CTAs a SM", "TOP/s median / p99", "bits of the oracle")
    report = Report("matrix-order", columns, a.out)
    macs = EXPERTS * ROWS * HIDDEN * TOKENS
    for name, (kind, *_) in TILES.items():
        raw = random_rows(kind, ROWS, HIDDEN, rng)
        one = cp.asarray(raw)
        w = cp.concatenate([cp.roll(one, 17 * i, 0).reshape(-1) for i in range(EXPERTS)])
        for planes in (1, 2):
            for z in range(EXPERTS):  # every expert has its own tokens
                part = slice(z * TOKENS, (z + 1) * TOKENS)
                at = z * TOKENS * HIDDEN
                args = (x[part], q[at * planes :], s[at // 32 :], np.int32(HIDDEN))
                rows(f"quantise_fragment_p{planes}", (HIDDEN // 256, TOKENS), (256,), args)
            for order in range(3):
                for c, mod in modules.items():
                    work = partial(gemm, mod, name, planes, order, (w, q, s, y), EXPERTS)
                    work()
                    stream.synchronize()
                    fact = "-"
                    if order == 1:
                        token = int(rng.integers(TOKENS))
                        want = product(kind, raw, x[3 * TOKENS + token].get(), planes)
                        fact = str(same(y[3, token].get(), np.roll(want, 51)))
                    ms = event_times(stream, work, 9)
                    tops = 2 * macs / (ms * 1e-3) / 1e12
                    text = f"{np.median(tops):.1f} / {np.percentile(tops, 1):.1f}"
                    report.add(name, planes, ORDERS[order], c, text, fact)


if __name__ == "__main__":
    main()
