"""Products of prompts on matrix units: docs/arithmetic.md, 11.

One sum for each element of the result, blocks of 32 ascending; what a row brings to a block is put
together once, what a token brings once.
"""

from __future__ import annotations

import numpy as np

from strata_core.kernels.exact_float import Bytes, Floats, fma
from strata_core.kernels.exact_quant import Activations, Blocks, unpack

CENTRED = frozenset({"Q4_1", "Q4_K"})
"""Types whose nibbles lose 8 before they are multiplied; what their minima lack is put there."""

BY_HALVES = frozenset({"Q6_K"})
"""Types of which each half of a block has a scale of its own."""


def rows_product(type_name: str, data: Bytes, rows: int, columns: int, x: Activations) -> Floats:
    """Stored rows times activations [T, columns / 32, ...]: float32 [T, rows]."""
    return product(type_name, unpack(type_name, data, rows, columns), x)


def product(type_name: str, blocks: Blocks, x: Activations) -> Floats:
    """Rows of the product, float32 [T, N]."""
    less = 8 if type_name in CENTRED else 0
    w = (blocks.w - less).reshape(*blocks.w.shape[:2], 2, 16).astype(np.float64)
    q = x.q.reshape(*x.q.shape[:2], 2, 16).astype(np.float64)
    acc = np.zeros((x.q.shape[0], blocks.w.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        factors = blocks.d[..., None] * blocks.scale.astype(np.float32)
        sums = x.scale * x.sum.astype(np.float32)
        low = _minima(blocks, less)
        for b in range(blocks.w.shape[1]):
            halves = np.einsum("nhi,thi->htn", w[:, b], q[:, b])  # exact: integers below 2^53
            parts = halves if type_name in BY_HALVES else halves.sum(axis=0, keepdims=True)
            value = np.zeros_like(acc)
            for half, part in enumerate(parts):
                value = fma(part.astype(np.float32), factors[:, b, half], value)
            acc = fma(value, x.scale[:, None, b], acc)
            if low is not None:
                acc = fma(low[:, b], sums[:, None, b], acc)
        return acc


def _minima(blocks: Blocks, less: int) -> Floats | None:
    """What a row adds for each activation of a block, where the type has minima."""
    if blocks.low is None or blocks.m is None:
        return None
    minima = np.float32(blocks.sign) * (blocks.m * blocks.low.astype(np.float32))
    if not less:
        return minima
    made: Floats = fma(np.float32(less), blocks.d * blocks.scale[..., 0].astype(np.float32), minima)
    return made
