"""Keys, values and attention: docs/arithmetic.md, sections 8 and 9.

Keys and values lie as [layers, context, width] in the KV type, for int8 with half scales [layers,
context, width / 32] beside them. A unit of attention is one token, one KV head and one split; it
computes all heads that share the KV head. Its result is a partial: m, l and the weighted sum of
each head. A second step folds the splits.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from llvmlite import ir

from strata_core.kernels.cpu import functions
from strata_core.kernels.cpu.emit import (
    F32,
    F32X8,
    I1,
    I8,
    I16,
    I32,
    I32X8,
    I64,
    Emit,
    V,
    Var,
    vec,
)
from strata_core.kernels.cpu.products import fold_rows
from strata_core.kernels.cpu.steps import Args, fold8, latch, step
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.exact import SPLIT, TILE

KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes of an element by KV type; int8 has a half scale for every 32 besides."""

PLACE_FIELDS = ("k", "v", "k_scales", "v_scales")
"""int64 fields of a token's place: addresses of its sequence's arrays."""

APPEND_ARGS = (
    "k",
    "v",
    "width",
    "positions",
    "places",
    "layer_offset",
    "status",
    "op",
)
"""`places`: PLACE_FIELDS of each token; `layer_offset`: first position of the layer, in rows."""


def _place(e: Emit, places: V, token: V, field: str) -> V:
    return e.load(I64, places + token * (8 * len(PLACE_FIELDS)), 8 * PLACE_FIELDS.index(field))


def emit_kv_append(module: ir.Module, target: Target, kv_type: str) -> None:
    """`kv_append`: round the rows of k and v and store them at their tokens' positions."""
    with step(module, "kv_append", APPEND_ARGS) as (e, a, begin, end), e.loop(begin, end) as t:
        position = e.load(I32, a.positions + t * 4).sext(I64) + a.layer_offset
        for name in ("k", "v"):
            source = getattr(a, name) + t * a.width * 4
            to = _place(e, a.places, t, name) + position * a.width * KV_BYTES[kv_type]
            bad = e.var(I1, False)
            if kv_type == "int8":
                scales = _place(e, a.places, t, f"{name}_scales")
                scales = scales + position * (a.width // 32) * 2
                _append_int8(e, target, source, to, scales, a.width, bad)
            else:
                _append_float(e, target, kv_type, source, to, a.width, bad)
            with e.when(bad.get()):
                latch(e, a.status, a.op)


def _any_lane(e: Emit, lanes: V) -> V:
    return V(e, e.b.icmp_unsigned("!=", lanes.bits(I8).raw, ir.Constant(I8, 0)))


def _append_float(
    e: Emit, target: Target, kv_type: str, source: V, to: V, width: V, bad: Var
) -> None:
    with e.loop(0, width, 8) as i:
        value = e.load(F32X8, source + i * 4)
        if kv_type == "fp32":
            wrong = (value.bits(I32X8) & 0x7F800000).compare("==", 0x7F800000)
            e.store(value, to + i * 4)
        else:
            half = target.narrow(e, value)
            wrong = (half & 0x7C00).compare("==", 0x7C00)
            e.store(half, to + i * 2)
        bad.set(bad.get() | _any_lane(e, wrong))


def _append_int8(e: Emit, target: Target, source: V, to: V, scales: V, width: V, bad: Var) -> None:
    with e.loop(0, width, 32) as i:
        values = [e.load(F32X8, source + i * 4, 32 * j) for j in range(4)]
        sizes = [v.bits(I32X8) & 0x7FFFFFFF for v in values]
        amax = e.umax(e.umax(sizes[0], sizes[1]), e.umax(sizes[2], sizes[3]))
        for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
            amax = e.umax(amax, amax.shuffle(None, lanes))
        half = target.narrow(e, amax.bits(F32X8) / 127.0)
        scale = target.widen(e, half)
        e.store(half[0], scales + (i // 32) * 2)
        wrong = (half & 0x7C00).compare("==", 0x7C00)
        bad.set(bad.get() | _any_lane(e, wrong))
        usable = (scale > 0.0) & (scale < float("inf"))
        divisor = e.select(usable, scale, e.const(F32X8, 1.0))
        for j, value in enumerate(values):
            kept = e.select(usable, value, e.const(F32X8, 0.0))
            q = e.rint(kept / divisor).to_int()
            q = e.smax(e.smin(q, e.const(I32X8, 127)), e.const(I32X8, -127))
            e.store(q.trunc(vec(I8, 8)), to + i + 8 * j)


ATTENTION_ARGS = (
    "q",
    "partials",
    "positions",
    "places",
    "layer_offset",
    "width",
    "kv_heads",
    "group",
    "window",
    "splits",
)
"""`group`: heads that share a KV head. `window`: positions seen, 0 for all. `splits`: address of
the number of splits that each token has room for; a token's first split is the one that holds its
first position. `partials`: float32 [tokens, heads, splits, 8 + head_dim], the first two m and l."""

PARTIAL_HEAD = 8
"""Floats before the weighted sum in a partial, so that it stays aligned."""

MOST_GROUP = 64
"""Heads that may share a KV head."""


@frozen
class _Range:
    """Positions `first` .. `end` - 1 of a token, and the split that `first` lies in."""

    first: V
    end: V
    split: V


def _range(e: Emit, a: Args, token: V) -> _Range:
    end = e.load(I32, a.positions + token * 4).sext(I64) + 1
    seen = e.smax(end - a.window, e.i64(0))
    first = e.select(a.window.compare("==", 0), e.i64(0), seen)
    return _Range(first, end, first // SPLIT)


def emit_attention(module: ir.Module, target: Target, kv_type: str, head_dim: int) -> None:
    """`attention`: a unit is (token, KV head, split); units without positions do nothing."""
    with step(module, "attention", ATTENTION_ARGS) as (e, a, begin, end):
        tile = _Tile(e, target, kv_type, head_dim)
        heads = a.kv_heads * a.group
        splits = e.load(I64, a.splits, align=8)
        row = 4 * (PARTIAL_HEAD + head_dim)
        with e.loop(begin, end) as unit:
            token, rest = unit // (a.kv_heads * splits), unit % (a.kv_heads * splits)
            head, number = rest // splits, rest % splits
            seen = _range(e, a, token)
            with e.when((seen.split + number) * SPLIT < seen.end):
                first_head = token * heads + head * a.group
                tile.scale_queries(a.q + first_head * (4 * head_dim), a.group)
                out = a.partials + (first_head * splits + number) * row
                tile.split(a, token, head, seen, seen.split + number, out, splits * row)


WHOLE_ARGS = (
    "q",
    "out",
    "positions",
    "places",
    "layer_offset",
    "width",
    "kv_heads",
    "group",
    "window",
)


def emit_whole_attention(module: ir.Module, target: Target, kv_type: str, head_dim: int) -> None:
    """`whole_attention`: a unit is (token, KV head) with all its splits; the same bits.

    For windows of many tokens, where the partials of all splits would not fit memory.
    """
    row = 4 * (PARTIAL_HEAD + head_dim)
    with step(module, "whole_attention", WHOLE_ARGS) as (e, a, begin, end):
        tile = _Tile(e, target, kv_type, head_dim)
        state, part = e.scratch(MOST_GROUP * row), e.scratch(MOST_GROUP * row)
        with e.loop(begin, end) as unit:
            token, head = unit // a.kv_heads, unit % a.kv_heads
            first_head = unit * a.group
            seen = _range(e, a, token)
            tile.scale_queries(a.q + first_head * (4 * head_dim), a.group)
            tile.split(a, token, head, seen, seen.split, state, e.i64(row))
            with e.loop(seen.split + 1, (seen.end - 1) // SPLIT + 1) as number:
                tile.split(a, token, head, seen, number, part, e.i64(row))
                with e.loop(0, a.group) as g:
                    _fold_partial(e, state + g * row, part + g * row, head_dim)
            with e.loop(0, a.group) as g:
                _divide(e, state + g * row, a.out + (first_head + g) * (4 * head_dim), head_dim)


def _clear_partials(e: Emit, out: V, group: V, pitch: V, head_dim: int) -> None:
    with e.loop(0, group) as g:
        partial = out + g * pitch
        e.clear(partial, e.i64(4 * (PARTIAL_HEAD + head_dim)))
        e.store(e.const(F32, float("-inf")), partial)


class _Tile:
    """32 positions of one KV head as floats on the stack, and the work of one head on them."""

    def __init__(self, e: Emit, target: Target, kv_type: str, head_dim: int) -> None:
        self.e, self.target, self.kv_type, self.dim = e, target, kv_type, head_dim
        self.keys = e.scratch(4 * TILE * head_dim)
        self.values = e.scratch(4 * TILE * head_dim)
        self.queries = e.scratch(4 * MOST_GROUP * head_dim)
        self.scores = e.scratch(4 * TILE)
        self.stripes = e.scratch(32 * 8)

    def scale_queries(self, q: V, group: V) -> None:
        """The heads' queries times 1 / sqrt(head_dim)."""
        e = self.e
        scale = float(np.float32(1.0 / np.sqrt(np.float64(self.dim))))
        with e.loop(0, group * self.dim, 8) as i:
            e.store(e.load(F32X8, q + i * 4) * scale, self.queries + i * 4)

    def read(self, a: Args, token: V, head: V, start: V, low: V, high: V) -> None:
        """Keys and values of positions `low` .. `high` - 1; row j is position `start` + j."""
        e, size = self.e, KV_BYTES[self.kv_type]
        for name, to in (("k", self.keys), ("v", self.values)):
            base = _place(e, a.places, token, name) + head * (self.dim * size)
            scales = _place(e, a.places, token, f"{name}_scales") + head * (self.dim // 32 * 2)
            with e.loop(low, high) as p:
                row = a.layer_offset + p
                source = base + row * a.width * size
                line = scales + row * (a.width // 32) * 2
                self._widen(source, line, to + (p - start) * (4 * self.dim))

    def _widen(self, source: V, scales: V, to: V) -> None:
        """One row of `dim` stored elements as floats."""
        e = self.e
        with e.loop(0, self.dim, 8) as i:
            if self.kv_type == "fp32":
                value = e.load(F32X8, source + i * 4)
            elif self.kv_type == "fp16":
                value = self.target.widen(e, e.load(vec(I16, 8), source + i * 2))
            else:
                half = e.splat(e.load(I16, scales + (i // 32) * 2))
                q = e.load(vec(I8, 8), source + i).sext(I32X8)
                value = q.to_float() * self.target.widen(e, half)
            e.store(value, to + i * 4, align=32)

    def split(self, a: Args, token: V, head: V, seen: _Range, number: V, out: V, pitch: V) -> None:
        """One split of a token's KV head: the partials of all its heads, `pitch` bytes apart."""
        e = self.e
        _clear_partials(e, out, a.group, pitch, self.dim)
        start = number * SPLIT
        first, stop = e.smax(start, seen.first), e.smin(start + SPLIT, seen.end)
        with e.loop((first // TILE) * TILE, stop, TILE) as p:
            low, high = e.smax(p, first), e.smin(p + TILE, stop)
            self.read(a, token, head, p, low, high)
            with e.loop(0, a.group) as g:
                query = self.queries + g * (4 * self.dim)
                self.attend(query, out + g * pitch, low - p, high - p)

    def attend(self, query: V, partial: V, low: V, high: V) -> None:
        """One head over rows `low` .. `high` - 1 of the tile: steps 1 to 4 of section 9."""
        e = self.e
        self._score(query, low, high)
        old, total = e.load(F32, partial), e.load(F32, partial, 4)
        scores = [e.load(F32X8, self.scores, 32 * k, align=32) for k in range(4)]
        top = _lane_largest(e, scores, old)
        shrink = functions.exp(e, old - top)
        wide = e.splat(top)
        stripes = None
        for k, s in enumerate(scores):
            p = functions.exp(e, s - wide)
            e.store(p, self.scores, 32 * k, align=32)
            stripes = p if stripes is None else stripes + p
        assert stripes is not None
        e.store(top, partial)
        e.store(e.fma(total, shrink, fold8(stripes)), partial, 4)
        self._weigh(partial + 4 * PARTIAL_HEAD, shrink, low, high)

    def _score(self, query: V, low: V, high: V) -> None:
        """Scores of the tile's rows, -infinity outside `low` .. `high` - 1."""
        e = self.e
        numbers = e.const(I32X8, list(range(8)))
        with e.loop(0, TILE, 8) as k:
            acc = [e.var(F32X8, 0.0) for _ in range(8)]
            rows = self.keys + k * (4 * self.dim)
            with e.loop(0, self.dim, 8) as i:
                q = e.load(F32X8, query + i * 4, align=32)
                for j in range(8):
                    key = e.load(F32X8, rows + i * 4, 4 * j * self.dim, align=32)
                    acc[j].set(e.fma(q, key, acc[j].get()))
            for j in range(8):
                e.store(acc[j].get(), self.stripes, 32 * j, align=32)
            row = numbers + e.splat(k.trunc(I32))
            inside = (row >= e.splat(low.trunc(I32))) & (row < e.splat(high.trunc(I32)))
            folded = fold_rows(e, self.stripes)
            score = e.select(inside, folded, e.const(F32X8, float("-inf")))
            e.store(score, self.scores + k * 4, align=32)

    def _weigh(self, out: V, shrink: V, low: V, high: V) -> None:
        """out = out * shrink, then each row's value times its weight, ascending."""
        e = self.e
        wide = e.splat(shrink)
        at_once = 8 if self.dim % 64 == 0 else 4 if self.dim % 32 == 0 else 1
        with e.loop(0, self.dim, 8 * at_once) as i:
            here = out + i * 4
            sums = [e.var(F32X8, e.load(F32X8, here, 32 * j) * wide) for j in range(at_once)]
            with e.loop(low, high) as row:
                p = e.splat(e.load(F32, self.scores + row * 4))
                value = self.values + row * (4 * self.dim) + i * 4
                for j, s in enumerate(sums):
                    s.set(e.fma(p, e.load(F32X8, value, 32 * j), s.get()))
            for j, s in enumerate(sums):
                e.store(s.get(), here, 32 * j)


def _lane_largest(e: Emit, vectors: list[V], start: V) -> V:
    """The largest of all lanes and `start`."""
    high = vectors[0]
    for v in vectors[1:]:
        high = e.select(v > high, v, high)
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        moved = high.shuffle(None, lanes)
        high = e.select(moved > high, moved, high)
    top = high[0]
    return e.select(top > start, top, start)


MERGE_ARGS = (
    "out",
    "partials",
    "positions",
    "heads",
    "window",
    "splits",
)


def emit_merge(module: ir.Module, head_dim: int) -> None:
    """`merge`: fold each head's splits, ascending, and divide; a unit is a token."""
    row = 4 * (PARTIAL_HEAD + head_dim)
    with step(module, "merge", MERGE_ARGS) as (e, a, begin, end):
        splits = e.load(I64, a.splits, align=8)
        with e.loop(begin, end) as token:
            seen = _range(e, a, token)
            count = (seen.end - 1) // SPLIT - seen.split + 1
            with e.loop(token * a.heads, (token + 1) * a.heads) as head:
                state = a.partials + head * splits * row
                with e.loop(1, count) as number:
                    _fold_partial(e, state, state + number * row, head_dim)
                _divide(e, state, a.out + head * (4 * head_dim), head_dim)


def _divide(e: Emit, state: V, out: V, head_dim: int) -> None:
    """The weighted sum over the sum of weights."""
    total = e.splat(e.load(F32, state, 4))
    for i in range(0, head_dim, 8):
        e.store(e.load(F32X8, state, 4 * (PARTIAL_HEAD + i)) / total, out, 4 * i)


def _fold_partial(e: Emit, state: V, part: V, head_dim: int) -> None:
    old, new = e.load(F32, state), e.load(F32, part)
    top = e.select(old > new, old, new)
    a, b = functions.exp(e, old - top), functions.exp(e, new - top)
    total = e.fma(e.load(F32, part, 4), b, e.load(F32, state, 4) * a)
    e.store(top, state)
    e.store(total, state, 4)
    for i in range(0, head_dim, 8):
        at = 4 * (PARTIAL_HEAD + i)
        kept = e.load(F32X8, state, at) * e.splat(a)
        e.store(e.fma(e.load(F32X8, part, at), e.splat(b), kept), state, at)
