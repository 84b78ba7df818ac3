"""The exact mode of the reference: every kernel of docs/arithmetic.md over plain arrays.

Slow and obvious, for tests and golden vectors. Functions take and return float32 arrays whose rows
are tokens, keep nothing, and may be called from any thread. Where the document latches an error,
they raise `NotFinite`.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from strata_core.errors import EngineError
from strata_core.kernels import exact_quant
from strata_core.kernels.exact_float import (
    Bytes,
    Floats,
    Ints,
    dot64,
    fma,
    fold8,
    sum64,
    widen,
)
from strata_core.kernels.exact_math import exp, sigmoid, silu

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
SPLIT, TILE = 256, 32
"""Positions of one split and of one tile of attention, counted from position 0."""


class NotFinite(EngineError):
    """An activation, key, value or router logit is an infinity or not a number."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"{kernel} met a value that is not finite",
            "a weight or an activation overflowed, or the file is damaged",
            "check the model file with `strata verify`",
        )


@frozen(eq=False)
class Matrix:
    """A weight matrix as stored: type name, rows, columns (the axis summed over), uint8 bytes."""

    type: str
    rows: int
    columns: int
    data: Bytes


def linear(x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
    """x [T, columns] times the weight's rows: [T, rows]."""
    if weight.type in FLOAT_TYPES:
        w = widen(weight.type, weight.data).reshape(weight.rows, weight.columns)
        with np.errstate(all="ignore"):
            out = np.stack([dot64(w, row) for row in x])
    else:
        out = product(x, weight)
    return out if bias is None else out + bias


def product(x: Floats, weight: Matrix, largest: int = exact_quant.TWO_PLANES) -> Floats:
    """A quantised weight's product: `largest` is the largest |q| of an activation."""
    quantised = exact_quant.quantise(x, largest)
    if not quantised.finite:
        raise NotFinite("linear")
    blocks = exact_quant.unpack(weight.type, weight.data, weight.rows, weight.columns)
    return exact_quant.product(blocks, quantised)


def embed(ids: Ints, table: Matrix) -> Floats:
    """Rows of the embedding table: [T, columns]."""
    raw = table.data.reshape(table.rows, -1)[ids]
    if table.type in FLOAT_TYPES:
        return widen(table.type, np.ascontiguousarray(raw)).reshape(len(ids), table.columns)
    return exact_quant.values(exact_quant.unpack(table.type, raw, len(ids), table.columns))


def rms_norm(x: Floats, weight: Floats, dim: int, eps: float) -> Floats:
    """Runs of `dim` elements of each row, each divided by its root mean square."""
    runs = x.reshape(-1, dim)
    with np.errstate(all="ignore"):
        mean = dot64(runs, runs) / np.float32(dim)
        factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
        result: Floats = (runs * factor[:, None]) * weight
    return result.reshape(x.shape)


def rope(x: Floats, cos: Floats, sin: Floats, heads: int) -> Floats:
    """Rotate the heads of x [T, heads * head_dim] by table rows [T, dim / 2] of their positions."""
    out = x.reshape(x.shape[0], heads, -1).copy()
    half = cos.shape[1]
    a, b = out[..., :half].copy(), out[..., half : 2 * half].copy()
    c, s = cos[:, None], sin[:, None]
    out[..., :half] = fma(-b, s, a * c)
    out[..., half : 2 * half] = fma(b, c, a * s)
    return out.reshape(x.shape)


def kv_round(x: Floats, kv_type: str) -> Floats:
    """What attention reads back of keys or values [..., head_dim] kept as `kv_type`."""
    with np.errstate(all="ignore"):
        if kv_type == "fp32":
            out = x
        elif kv_type == "fp16":
            out = x.astype(np.float16).astype(np.float32)
        elif kv_type == "int8":
            blocks = x.reshape(*x.shape[:-1], -1, 32)
            amax = np.abs(blocks).max(axis=-1, keepdims=True)
            d = (amax / np.float32(127)).astype(np.float16).astype(np.float32)
            q = np.clip(np.rint(blocks / np.where(d == 0, np.float32(np.inf), d)), -127, 127)
            out = np.where(np.isfinite(d), q * d, np.float32(np.nan)).reshape(x.shape)
        else:
            raise ValueError(f"{kv_type} is not a KV type")
    if not np.isfinite(out).all():
        raise NotFinite("kv_append")
    return out


def attention(
    q: Floats,
    keys: Floats,
    values: Floats,
    positions: Ints,
    window: int | None = None,
) -> Floats:
    """q [T, heads, D] at `positions` [T] over keys and values [P, kv_heads, D] of one sequence."""
    group = q.shape[1] // keys.shape[1]
    out = np.empty_like(q)
    with np.errstate(all="ignore"):
        scaled = q * np.float32(1.0 / np.sqrt(np.float64(q.shape[2])))
        for t, position in enumerate(positions):
            first = 0 if window is None else max(0, int(position) - window + 1)
            for h in range(q.shape[1]):
                k, v = keys[:, h // group], values[:, h // group]
                out[t, h] = _one_head(scaled[t, h], k, v, first, int(position) + 1)
    return out


State = tuple[np.float32, np.float32, Floats]
"""Running maximum, sum of weights, weighted sum of values."""


def _one_head(q: Floats, k: Floats, v: Floats, first: int, end: int) -> Floats:
    """One head of one token over positions `first` .. `end` - 1."""
    state: State | None = None
    for split in range(first - first % SPLIT, end, SPLIT):
        part = _split(q, k, v, max(first, split), min(end, split + SPLIT))
        state = part if state is None else _merge(state, part)
    assert state is not None
    return state[2] / state[1]


def _split(q: Floats, k: Floats, v: Floats, first: int, end: int) -> State:
    high, total, out = np.float32(-np.inf), np.float32(0), np.zeros_like(q)
    for tile in range(first - first % TILE, end, TILE):
        a, b = max(first, tile), min(end, tile + TILE)
        score = np.zeros((b - a, 8), np.float32)
        for i in range(0, len(q), 8):
            score = fma(q[i : i + 8], k[a:b, i : i + 8], score)
        s = fold8(score)
        top = np.maximum(high, s.max())
        shrink = exp(np.asarray(high - top))
        p = exp(s - top)
        stripes = np.zeros(8, np.float32)
        for j in range(a, b):
            stripes[j % 8] += p[j - a]
        total = np.float32(fma(total, shrink, fold8(stripes)))
        out = out * shrink
        for j in range(a, b):
            out = fma(p[j - a], v[j], out)
        high = top
    return high, total, out


def _merge(state: State, part: State) -> State:
    top = np.maximum(state[0], part[0])
    a, b = exp(np.asarray(state[0] - top)), exp(np.asarray(part[0] - top))
    total = np.float32(fma(part[1], b, state[1] * a))
    return top, total, fma(part[2], b, state[2] * a)


def silu_mul(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up, elementwise."""
    with np.errstate(all="ignore"):
        result: Floats = silu(gate) * up
    return result


def route(logits: Floats, top_k: int, *, renormalise: bool) -> tuple[Ints, Floats]:
    """Picks int32 [T, top_k] in router order and their weights float32 [T, top_k]."""
    if not np.isfinite(logits).all():
        raise NotFinite("route")
    e = exp(logits - logits.max(axis=1, keepdims=True))
    p = e / sum64(e)[:, None]
    picks = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, picks, axis=1)
    if renormalise:
        total = weights[:, 0]
        for k in range(1, top_k):
            total = total + weights[:, k]
        weights = weights / total[:, None]
    return picks.astype(np.int32), weights


def expert(x: Floats, gate: Matrix, up: Matrix, down: Matrix) -> Floats:
    """One expert's unweighted rows of x [T, hidden]."""
    return linear(silu_mul(linear(x, gate), linear(x, up)), down)


def combine(x: Floats, rows: Floats, weights: Floats) -> Floats:
    """x [T, H] plus rows [T, top_k, H] weighted by [T, top_k], in router order."""
    acc = np.zeros_like(x)
    for k in range(weights.shape[1]):
        acc = fma(weights[:, k, None], rows[:, k], acc)
    return x + acc


def gate_add(x: Floats, y: Floats, gate: Floats) -> Floats:
    """x [T, H] + sigmoid(gate [T, 1]) * y."""
    return fma(sigmoid(gate), y, x)
