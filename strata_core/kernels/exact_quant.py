"""Quantised activations and products with quantised weights: docs/arithmetic.md, 2 and 3.

Each type has one function that turns the stored bytes of rows into `Blocks`: signed integer
weights, the integers they are scaled by, and the float scales of every block of 32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.exact_float import Bytes, Floats, Ints, fma, fold8

TWO_PLANES = 16383
"""Largest |q| of an activation; the contract's choice."""

ONE_PLANE = 127
"""Largest |q| in the named mode with one plane."""

MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)
"""Twice the E2M1 value of a nibble."""


@frozen(eq=False)
class Activations:
    """Rows of quantised activations: q int32 [T, B, 32], scale float32 [T, B], sum int32 [T, B].

    `finite` is False where a value was an infinity or a NaN; the rest is unspecified then.
    """

    q: Ints
    scale: Floats
    sum: Ints
    finite: bool


def quantise(x: Floats, largest: int = TWO_PLANES) -> Activations:
    """Quantise float32 rows [T, K], K a multiple of 32."""
    blocks = x.reshape(x.shape[0], -1, 32)
    if not np.isfinite(x).all():
        zero = np.zeros(blocks.shape[:2], np.int32)
        return Activations(
            np.zeros(blocks.shape, np.int32), zero.astype(np.float32), zero, finite=False
        )
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=2)
        scale = amax / np.float32(largest)
        inverse = np.float32(largest) / amax
        empty = (scale == 0) | np.isinf(inverse)
        q = np.rint(blocks * np.where(empty, np.float32(0), inverse)[..., None]).astype(np.int32)
    scale = np.where(empty, np.float32(0), scale)
    return Activations(q, scale, q.sum(axis=2, dtype=np.int32), finite=True)


@frozen(eq=False)
class Blocks:
    """Rows of weights, block by block of 32.

    `w` int32 [N, B, 32]; `scale` int32 [N, B, 2] multiplies the first and the second 16 weights;
    `d` float32 [N, B]. Where the type has a minimum, `low` int32 [N, B] scales the activation sum,
    `m` float32 [N, B] is its factor, and `sign` says whether it is added or subtracted.
    """

    w: Ints
    scale: Ints
    d: Floats
    low: Ints | None = None
    m: Floats | None = None
    sign: int = 0


def _half(raw: Bytes, offset: int) -> Floats:
    with np.errstate(invalid="ignore"):
        value = np.ascontiguousarray(raw[..., offset : offset + 2]).view("<f2")[..., 0]
        return value.astype(np.float32)


def _nibbles(n: Bytes) -> Ints:
    return np.concatenate([n & 15, n >> 4], axis=-1).astype(np.int32)


def _bits(h: Bytes) -> Ints:
    return np.unpackbits(h, axis=-1, bitorder="little").astype(np.int32)


def _plain(w: Ints, d: Floats) -> Blocks:
    return Blocks(w, np.ones((*d.shape, 2), np.int32), d)


def _offset(w: Ints, d: Floats, m: Floats) -> Blocks:
    one = np.ones(d.shape, np.int32)
    return Blocks(w, np.ones((*d.shape, 2), np.int32), d, one, m, +1)


def _q8_0(raw: Bytes) -> Blocks:
    return _plain(raw[..., 2:].view(np.int8).astype(np.int32), _half(raw, 0))


def _q4_0(raw: Bytes) -> Blocks:
    return _plain(_nibbles(raw[..., 2:]) - 8, _half(raw, 0))


def _q4_1(raw: Bytes) -> Blocks:
    return _offset(_nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Bytes) -> Blocks:
    return _plain((_nibbles(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4) - 16, _half(raw, 0))


def _q5_1(raw: Bytes) -> Blocks:
    w = _nibbles(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4
    return _offset(w, _half(raw, 0), _half(raw, 2))


def _mxfp4(raw: Bytes) -> Blocks:
    exponent = raw[..., 0].astype(np.int32)
    d = np.where(exponent == 255, np.inf, np.ldexp(1.0, exponent - 128))
    return _plain(MXFP4_VALUES[_nibbles(raw[..., 1:])], d.astype(np.float32))


def _k_scales(s: Bytes) -> tuple[Ints, Ints]:
    """The eight 6-bit scales and minimums in the 12 bytes of a superblock: [..., 8] each."""
    a, b, c = s[..., 0:4].astype(np.int32), s[..., 4:8].astype(np.int32), s[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    low = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return scale.astype(np.int32), low.astype(np.int32)


def _k(raw: Bytes, w: Ints) -> Blocks:
    """Q4_K and Q5_K: `w` int32 [N, superblocks, 8, 32]."""
    rows = raw.shape[0]
    scale, low = (v.reshape(rows, -1) for v in _k_scales(raw[..., 4:16]))
    d = np.repeat(_half(raw, 0), 8, axis=1)
    m = np.repeat(_half(raw, 2), 8, axis=1)
    return Blocks(w.reshape(rows, -1, 32), np.stack([scale, scale], -1), d, low, m, -1)


def _k_nibbles(n: Bytes) -> Ints:
    """128 bytes of a superblock as [..., 8, 32]: per 32 bytes first the low, then the high ones."""
    groups = n.reshape(*n.shape[:-1], 4, 1, 32)
    both = np.concatenate([groups & 15, groups >> 4], axis=-2)
    return both.reshape(*n.shape[:-1], 8, 32).astype(np.int32)


def _q4_k(raw: Bytes) -> Blocks:
    return _k(raw, _k_nibbles(raw[..., 16:]))


def _q5_k(raw: Bytes) -> Blocks:
    h = raw[..., None, 16:48].astype(np.int32)
    fifth = (h >> np.arange(8, dtype=np.int32)[:, None]) & 1
    return _k(raw, _k_nibbles(raw[..., 48:]) | fifth << 4)


def _q6_k(raw: Bytes) -> Blocks:
    rows, supers = raw.shape[:2]
    low = raw[..., 0:128].reshape(rows, supers, 2, 2, 32).astype(np.int32)
    high = raw[..., 128:192].reshape(rows, supers, 2, 1, 32).astype(np.int32)
    four = np.concatenate([low & 15, low >> 4], axis=3)
    two = (high >> np.array([0, 2, 4, 6], np.int32)[:, None]) & 3
    w = (four | two << 4) - 32
    scale = raw[..., 192:208].view(np.int8).astype(np.int32)
    d = np.repeat(_half(raw, 208), 8, axis=1)
    return Blocks(w.reshape(rows, -1, 32), scale.reshape(rows, -1, 2), d)


UNPACK: dict[str, Callable[[Bytes], Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Stored bytes [N, blocks or superblocks, bytes of one] to `Blocks`, by type."""


def unpack(type_name: str, data: Bytes, rows: int, columns: int) -> Blocks:
    """The `Blocks` of `rows` rows of `columns` weights, from their bytes as stored."""
    kind = TYPES[type_name]
    raw = data.reshape(rows, columns // kind.block, kind.block_bytes)
    return UNPACK[type_name](raw)


def sums(blocks: Blocks, x: Activations) -> tuple[Ints, Ints | None]:
    """`S` and, where the type has a minimum, `M`: int32 [T, N, B].

    Checked to fit int32. The products run through float64, where integers this small are exact.
    """
    halves_w = blocks.w.reshape(*blocks.w.shape[:2], 2, 16).astype(np.float64)
    halves_q = x.q.reshape(*x.q.shape[:2], 2, 16).astype(np.float64)
    dots = np.einsum("nbhi,tbhi->tnbh", halves_w, halves_q)
    total = (dots.astype(np.int64) * blocks.scale).sum(axis=3)
    if np.abs(total).max(initial=0) > np.iinfo(np.int32).max:
        raise OverflowError("a block's integer sum left the range of int32")
    low = None
    if blocks.low is not None:
        low = (blocks.low[None] * x.sum[:, None]).astype(np.int32)
    return total.astype(np.int32), low


def product(blocks: Blocks, x: Activations) -> Floats:
    """Rows of the product, float32 [T, N]: eight stripes, block after block, then `fold8`."""
    total, low = sums(blocks, x)
    tokens, rows, count = total.shape
    acc = np.zeros((tokens, rows, 8), np.float32)
    with np.errstate(all="ignore"):
        for b in range(count):
            stripe = acc[..., b % 8]
            xd = x.scale[:, None, b]
            step = blocks.d[None, :, b] * xd
            if low is not None and blocks.m is not None:
                m_step = blocks.m[None, :, b] * xd
                m_int = low[..., b].astype(np.float32)
                if blocks.sign < 0:
                    stripe = fma(-m_int, m_step, stripe)
            stripe = fma(total[..., b].astype(np.float32), step, stripe)
            if low is not None and blocks.sign > 0:
                stripe = fma(m_int, m_step, stripe)
            acc[..., b % 8] = stripe
        return fold8(acc)


def values(blocks: Blocks) -> Floats:
    """The weights as float32 [N, B * 32]: section 3.3."""
    scaled = np.repeat(blocks.scale, 16, axis=2) * blocks.w
    with np.errstate(all="ignore"):
        w = blocks.d[..., None] * scaled.astype(np.float32)
        if blocks.low is not None and blocks.m is not None:
            low = (blocks.m * blocks.low.astype(np.float32))[..., None]
            w = w - low if blocks.sign < 0 else w + low
    return w.reshape(blocks.w.shape[0], -1)
