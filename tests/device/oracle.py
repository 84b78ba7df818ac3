"""The arithmetic of the measured kernels once more, in numpy: slow, obvious, independent.

Float32 results are bit-exact: `fma` rounds once. Formats are GGUF's; the order is that of
docs/arithmetic.md (stripe = block mod 8, ascending, fold ((s0+s1)+s2)+...).
"""

from __future__ import annotations

import numpy as np

F = np.float32
BLOCK_BYTES = {"Q4K": 18, "Q80": 34, "MX4": 17}
"""Bytes of 32 weights (a Q4_K superblock of 256 takes 8 times 18)."""

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)


def fma(a, b, c):
    """a * b + c in float32 with one rounding: the sum is kept in float64, rounded to odd."""
    p = np.asarray(a, F).astype(np.float64) * np.asarray(b, F).astype(np.float64)
    c = np.asarray(c, F).astype(np.float64)
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    even = (s.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
    return odd.astype(F)


def quantise(x, planes):
    """(q int32 [blocks, 32], d float32 [blocks]) of one row of activations."""
    x = np.asarray(x, F).reshape(-1, 32)
    top = F(16383 if planes == 2 else 127)
    amax = np.abs(x).max(1)
    with np.errstate(divide="ignore"):
        d, inverse = (amax / top).astype(F), (top / amax).astype(F)
    dead = (d == 0) | np.isinf(inverse)
    scaled = x * np.where(dead, F(0), inverse)[:, None]
    q = np.clip(np.rint(scaled.astype(F)), -top, top).astype(np.int32)
    return q, np.where(dead, F(0), d).astype(F)


def random_rows(kind, rows, columns, rng):
    """uint8 [rows, bytes] of valid blocks with every field random."""
    blocks = rows * columns // 32

    def halves(n, low, high):
        return rng.uniform(low, high, n).astype(np.float16).view(np.uint8).reshape(n, 2)

    if kind == "Q4K":
        n = blocks // 8
        out = rng.integers(0, 256, (n, 144), np.uint8)
        out[:, 0:2], out[:, 2:4] = halves(n, 2e-4, 6e-4), halves(n, 1e-3, 4e-3)
    elif kind == "Q80":
        out = rng.integers(0, 256, (blocks, 34), np.uint8)
        out[:, 0:2] = halves(blocks, 1e-4, 4e-4)
    else:
        out = rng.integers(0, 256, (blocks, 17), np.uint8)
        out[:, 0] = rng.integers(119, 123, blocks)
    return out.reshape(rows, -1)


def unpack(kind, raw):
    """(v int32 [rows, blocks, 32], sc, mn int32, d, m float32 [rows, blocks]) of packed rows."""
    rows = raw.shape[0]
    if kind == "Q4K":
        b = raw.reshape(rows, -1, 144)
        half = np.ascontiguousarray(b[..., :4]).view(np.float16).astype(F)
        s = b[..., 4:16].astype(np.int32)
        low, high, both = s[..., 0:4], s[..., 4:8], s[..., 8:12]
        sc = np.concatenate([low & 63, (both & 15) | ((low >> 6) << 4)], -1)
        mn = np.concatenate([high & 63, (both >> 4) | ((high >> 6) << 4)], -1)
        q = b[..., 16:].reshape(rows, -1, 4, 32).astype(np.int32)
        v = np.stack([q & 15, q >> 4], 3).reshape(rows, -1, 32)
        d, m = (np.repeat(half[..., i], 8, 1) for i in (0, 1))
        return v, sc.reshape(rows, -1), mn.reshape(rows, -1), d, m
    if kind == "Q80":
        b = raw.reshape(rows, -1, 34)
        d = np.ascontiguousarray(b[..., :2]).view(np.float16)[..., 0].astype(F)
        v = np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(np.int32)
    else:
        b = raw.reshape(rows, -1, 17)
        d = np.ldexp(F(1), b[..., 0].astype(np.int32) - 128).astype(F)
        q = b[..., 1:]
        v = np.concatenate([E2M1[q & 15], E2M1[q >> 4]], -1)
    one = np.ones(d.shape, np.int32)
    return v, one, one * 0, d, np.zeros_like(d)


def product(kind, raw, x, planes):
    """Exact rows times one row of activations: float32 [rows]."""
    v, sc, mn, d, m = unpack(kind, raw)
    q, xd = quantise(x, planes)
    dots = sc.astype(np.int64) * np.einsum("rbe,be->rb", v.astype(np.int64), q.astype(np.int64))
    mins = mn.astype(np.int64) * q.sum(1)
    stripes = np.zeros((raw.shape[0], 8), F)
    for b in range(v.shape[1]):
        acc = stripes[:, b & 7]
        if kind == "Q4K":
            acc = fma(-mins[:, b].astype(F), (m[:, b] * xd[b]).astype(F), acc)
        stripes[:, b & 7] = fma(dots[:, b].astype(F), (d[:, b] * xd[b]).astype(F), acc)
    total = stripes[:, 0]
    for i in range(1, 8):
        total = (total + stripes[:, i]).astype(F)
    return total


def exponential(x):
    """The kernels' polynomial exponential."""
    x = np.clip(np.asarray(x, F), F(-87), F(87))
    t = (x * F(1.4426950408889634)).astype(F)
    n = np.rint(t)
    f = (t - n).astype(F)
    r = np.full_like(f, F(1.5403530e-4))
    for c in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        r = fma(r, f, F(c))
    return (r.view(np.int32) + (n.astype(np.int32) << 23)).view(F)


def expert(kind, blob, x, planes, hidden, inner):
    """One expert's unweighted row for one token: down(silu(gate(x)) * up(x))."""
    wide, narrow = hidden // 32 * BLOCK_BYTES[kind], inner // 32 * BLOCK_BYTES[kind]
    rows = blob[: 2 * inner * wide].reshape(2 * inner, wide)
    both = product(kind, rows, x, planes)
    gate, up = both[:inner], both[inner:]
    h = ((gate / (F(1) + exponential(-gate)).astype(F)).astype(F) * up).astype(F)
    tail = blob[2 * inner * wide :].reshape(hidden, narrow)
    return product(kind, tail, h, planes)
