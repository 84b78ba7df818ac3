"""Rows of quantised weights times many tokens: the same bits as `products.py`, for prompts.

With many tokens to share it, more work goes into a weight row: eight blocks are transposed, so that
lane `b` of vector `k` holds weights 2k and 2k + 1 of block `b`, with integer scales multiplied in
and offsets subtracted. The sums of eight blocks then come out of sixteen products without any
reduction. Records have their `q` in the same order, and their sums as floats:

int16 q [16, 8 blocks, 2], float32 scales [8], float32 sums [8].
"""

from __future__ import annotations

from llvmlite import ir

from strata_core.kernels.cpu.emit import F32X8, I16X16, I32X8, I64, VOID, Emit, V
from strata_core.kernels.cpu.products import (
    AHEAD_MANY,
    RECORD,
    RECORD_SCALES,
    RECORD_SUMS,
    ROWS_ARGS,
    TILE_ROWS,
    TILE_TOKENS,
    Shape,
    Tokens,
    Work,
    copy_tail,
    fold_rows,
    prefetch,
    transpose8,
)
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.cpu.unpack import GROUP_BYTES, UNPACK, Scales, Unpack


def emit_tile_rows(module: ir.Module, target: Target, type_name: str) -> str:
    """Define `tiles_TYPE` with the arguments of `rows_TYPE` and return its name."""
    name = f"tiles_{type_name}"
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * ROWS_ARGS), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    e = Emit(module, function)
    work = Work(
        e.scratch(32 * TILE_ROWS * TILE_TOKENS),
        e.scratch(32 * TILE_TOKENS),
        e.scratch(GROUP_BYTES[type_name]),
    )
    _rows(e, target, type_name, Shape(*e.args), work)
    e.finish()
    return name


def _rows(e: Emit, target: Target, type_name: str, shape: Shape, work: Work) -> None:
    size = GROUP_BYTES[type_name]
    whole = shape.blocks // 8
    folded = e.scratch(32)
    with e.loop(0, shape.rows, TILE_ROWS) as first:
        rows = e.smin(shape.rows - first, e.i64(TILE_ROWS))
        e.clear(work.stripes, shape.tokens * (32 * TILE_ROWS))
        with e.loop(0, whole) as g:
            tokens = Tokens(shape.tokens, shape.xs, g * RECORD, work.halves)
            with e.loop(0, rows) as r:
                w = shape.w + (first + r) * shape.stride + g * size
                prefetch(e, type_name, w + AHEAD_MANY * size)
                _group(e, target, UNPACK[type_name], w, tokens, work.stripes + r * 32)
        with e.when((shape.blocks % 8).compare("!=", 0)):
            tokens = Tokens(shape.tokens, shape.xs, whole * RECORD, work.halves)
            with e.loop(0, rows) as r:
                row = shape.w + (first + r) * shape.stride
                copy_tail(e, type_name, shape, work, row, whole)
                _group(e, target, UNPACK[type_name], work.tail, tokens, work.stripes + r * 32)
        with e.loop(0, shape.tokens) as t:
            e.store(fold_rows(e, work.stripes + t * (32 * TILE_ROWS)), folded, align=32)
            e.copy(shape.y(e, t) + first * 4, folded, rows * 4)


def _group(e: Emit, target: Target, unpack: Unpack, w: V, tokens: Tokens, acc: V) -> None:
    """Eight blocks of one row for every token; `acc` holds a vector a token."""
    columns, _ = _half(e, target, unpack, w, 0)
    with e.loop(0, tokens.count) as t:
        x = tokens.record(e, t)
        e.store(_products(e, target, columns, x, None), tokens.halves + t * 32, align=32)
    columns, scales = _half(e, target, unpack, w, 1)
    low = scales.low.to_float() if scales.low is not None else None
    with e.loop(0, tokens.count) as t:
        x = tokens.record(e, t)
        half = e.load(I32X8, tokens.halves + t * 32, align=32)
        total = _products(e, target, columns, x + 256, half).to_float()
        cell = acc + t * (32 * TILE_ROWS)
        old = e.load(F32X8, cell, align=32)
        e.store(_accumulate(e, unpack, scales, low, x, total, old), cell, align=32)


def _half(e: Emit, target: Target, unpack: Unpack, w: V, half: int) -> tuple[list[V], Scales]:
    """The first or the second 16 weights of eight blocks, transposed; and the scales."""
    context = unpack.open(e, target, w)
    scales = unpack.scales(e, target, context)
    rows = [unpack.w(e, target, context, b)[half] for b in range(8)]
    for b, row in enumerate(rows):
        plain = row - unpack.bias if unpack.bias else row
        odd = unpack.odd_shift and b % 2
        rows[b] = (plain >> unpack.odd_shift if odd else plain).bits(I32X8)
    columns = [column.bits(I16X16) for column in transpose8(rows)]
    if scales.scale is not None:
        pairs = (scales.scale | (scales.scale << 16)).bits(I16X16)
        columns = [column * pairs for column in columns]
    return columns, scales


def _products(e: Emit, target: Target, columns: list[V], x: V, acc: V | None) -> V:
    """The eight sums of eight columns, on top of `acc`."""
    for k, column in enumerate(columns):
        acc = target.pair_dot(e, acc, column, e.load(I16X16, x, 32 * k))
    assert acc is not None
    return acc


def _accumulate(
    e: Emit, unpack: Unpack, scales: Scales, low: V | None, x: V, total: V, acc: V
) -> V:
    """One step of the eight stripes. The minimum's product of floats is exact but for its last
    rounding, so it is what the integer product rounds to."""
    xd = e.load(F32X8, x, RECORD_SCALES)
    step = scales.d * xd
    if scales.m is None:
        return e.fma(total, step, acc)
    sums = e.load(F32X8, x, RECORD_SUMS)
    minimum = sums if low is None else sums * low
    if unpack.sign < 0:
        return e.fma(total, step, e.fma(-minimum, scales.m * xd, acc))
    return e.fma(minimum, scales.m * xd, e.fma(total, step, acc))
