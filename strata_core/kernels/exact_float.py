"""Single float operations and folds of docs/arithmetic.md, in numpy and without any hardware fma.

Arrays of float32 in, arrays of float32 out, with broadcasting. numpy's own float32 `+ - * /` and
`sqrt` round once, as the document asks; only fma has to be made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Floats:
    """`a * b + c` of float32 values, rounded once.

    The product of two float32 is exact in float64. The sum is made in float64 rounded to odd: where
    it is inexact and its last bit is even, it moves one step towards what was lost. A float64 so
    made rounds to the right float32, since it has more than two bits to spare (Boldo and Melquiond
    2008, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd").
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32)
        addend = np.asarray(c, np.float32).astype(np.float64)
        total = np.asarray(product + addend)
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        odd = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
        step = np.where((lost > 0) == (total > 0), 1, -1)
        result: Floats = np.where(odd, bits + step, bits).view(np.float64).astype(np.float32)
    return result


def fold8(stripes: Floats) -> Floats:
    """`(((s0 + s1) + s2) + ...) + s7` over the last axis of [..., 8]."""
    total = stripes[..., 0]
    for j in range(1, 8):
        total = total + stripes[..., j]
    return total


def fold64(stripes: Floats) -> Floats:
    """The eight runs of stripes `j, j + 8, ...` added ascending, then `fold8`; [..., 64] in."""
    runs = stripes.reshape(*stripes.shape[:-1], 8, 8)
    total = runs[..., 0, :]
    for j in range(1, 8):
        total = total + runs[..., j, :]
    return fold8(total)


def padded(x: Floats, multiple: int) -> Floats:
    """`x` with +0 appended to the last axis up to a multiple of `multiple`."""
    short = -x.shape[-1] % multiple
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x


def dot64(w: Floats, x: Floats) -> Floats:
    """Products of float rows: `w` and `x` broadcast to [..., K]; 64 stripes, then `fold64`."""
    w, x = padded(w, 64), padded(x, 64)
    shape = np.broadcast_shapes(w.shape, x.shape)
    acc = np.zeros((*shape[:-1], 64), np.float32)
    for k in range(0, shape[-1], 64):
        acc = fma(w[..., k : k + 64], x[..., k : k + 64], acc)
    return fold64(acc)


def sum64(x: Floats) -> Floats:
    """Sum over the last axis: stripes `i mod 64`, then `fold64`."""
    x = padded(x, 64)
    acc = np.zeros((*x.shape[:-1], 64), np.float32)
    for k in range(0, x.shape[-1], 64):
        acc = acc + x[..., k : k + 64]
    return fold64(acc)


def widen(type_name: str, data: Bytes) -> Floats:
    """Float weights as stored (F32, F16 or BF16, little endian) as float32, exactly."""
    if type_name == "F32":
        return data.view("<f4").astype(np.float32)
    if type_name == "F16":
        return data.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{type_name} is not a float type")
