"""Rows of quantised weights times windows of quantised activations: docs/arithmetic.md, 2 and 3.

An activation row is stored as records, one for every eight blocks: 256 int16 `q`, 8 float scales,
8 int32 sums. A weight row is read eight blocks at a time; the integer sums of the eight blocks are
brought into the eight lanes of one vector, and one fma adds them to the row's eight stripes.
Several tokens share the unpacking of a weight row.
"""

from __future__ import annotations

from llvmlite import ir

from strata_core.kernels.cpu.emit import (
    F32X8,
    I16X16,
    I32X8,
    I64,
    VOID,
    Emit,
    V,
    Var,
)
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.cpu.unpack import GROUP_BYTES, UNPACK, Scales, Unpack

RECORD = 576
"""Bytes of an activation record."""

RECORD_SCALES, RECORD_SUMS = 512, 544
"""Offsets of the scales and the sums in a record."""

TILE_ROWS = 8
"""Weight rows that are folded together."""

TILE_TOKENS = 32
"""Tokens computed at once."""


AHEAD_ONE, AHEAD_MANY = 2048, 4
"""How far weights are asked for in advance: bytes along a row for one token, groups for several."""


def prefetch(e: Emit, type_name: str, address: V) -> None:
    """Ask for the lines of eight blocks."""
    for line in range(0, GROUP_BYTES[type_name], 64):
        e.prefetch(address + line)


def _interleave(a: V, b: V) -> V:
    """Pairs of neighbours of `a` and of `b` added, in 128-bit halves: [a b a b | a b a b]."""
    low = a.shuffle(b, [0, 8, 1, 9, 4, 12, 5, 13])
    high = a.shuffle(b, [2, 10, 3, 11, 6, 14, 7, 15])
    return low + high


def _reduce4(p: list[V]) -> V:
    """Four vectors of eight partial sums as [s0 s1 s2 s3 | s0' s1' s2' s3'], still in halves."""
    a, b = _interleave(p[0], p[1]), _interleave(p[2], p[3])
    low = a.shuffle(b, [0, 1, 8, 9, 4, 5, 12, 13])
    high = a.shuffle(b, [2, 3, 10, 11, 6, 7, 14, 15])
    return low + high


def _join(first: V, second: V) -> V:
    """The eight sums of two results of `_reduce4`."""
    own = first.shuffle(second, [0, 1, 2, 3, 12, 13, 14, 15])
    other = first.shuffle(second, [4, 5, 6, 7, 8, 9, 10, 11])
    return own + other


def _half_group(e: Emit, target: Target, w: list[tuple[V, V]], x: V, first: int) -> V:
    """Products of four unpacked blocks, numbered from `first`, with the record at `x`."""
    sums = []
    for i, (a, b) in enumerate(w):
        at = (first + i) * 64
        acc = target.pair_dot(e, None, a, e.load(I16X16, x, at))
        sums.append(target.pair_dot(e, acc, b, e.load(I16X16, x, at + 32)))
    return _reduce4(sums)


def _accumulate(e: Emit, unpack: Unpack, scales: Scales, x: V, total: V, acc: V) -> V:
    """One step of the eight stripes, from the integer sums of eight blocks."""
    xd = e.load(F32X8, x, RECORD_SCALES)
    total = unpack.sums(e, total)
    if unpack.bias:
        total = total - e.load(I32X8, x, RECORD_SUMS) * unpack.bias
    if scales.scale is not None:
        total = total * scales.scale
    if scales.m is None:
        return e.fma(total.to_float(), scales.d * xd, acc)
    low = e.load(I32X8, x, RECORD_SUMS)
    if scales.low is not None:
        low = low * scales.low
    if unpack.sign < 0:
        acc = e.fma(-low.to_float(), scales.m * xd, acc)
        return e.fma(total.to_float(), scales.d * xd, acc)
    acc = e.fma(total.to_float(), scales.d * xd, acc)
    return e.fma(low.to_float(), scales.m * xd, acc)


def transpose8(rows: list[V]) -> list[V]:
    """Eight vectors of eight lanes, transposed."""
    quads = []
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        quads.append(a.shuffle(b, [0, 8, 1, 9, 4, 12, 5, 13]))
        quads.append(a.shuffle(b, [2, 10, 3, 11, 6, 14, 7, 15]))
    fours = []
    for i in (0, 1):
        for a, b in ((quads[i], quads[i + 2]), (quads[i + 4], quads[i + 6])):
            fours.append(a.shuffle(b, [0, 1, 8, 9, 4, 5, 12, 13]))
            fours.append(a.shuffle(b, [2, 3, 10, 11, 6, 7, 14, 15]))
    # fours: columns (0, 4), (1, 5) of rows 0-3, of rows 4-7, then (2, 6), (3, 7) likewise
    columns: list[V] = []
    for lanes in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]):
        for base in (0, 4):
            columns += [fours[base + k].shuffle(fours[base + 2 + k], lanes) for k in (0, 1)]
    return columns


def fold_rows(e: Emit, stripes: V) -> V:
    """`fold8` of eight rows at once: `stripes` is the address of 8 vectors; lane r is row r."""
    columns = transpose8([e.load(F32X8, stripes, 32 * r, align=32) for r in range(8)])
    total = columns[0]
    for column in columns[1:]:
        total = total + column
    return total


def _group_one(e: Emit, target: Target, unpack: Unpack, w: V, x: V, acc: Var) -> None:
    """Eight blocks of one row for one token."""
    context = unpack.open(e, target, w)
    halves = []
    for first in (0, 4):
        blocks = [unpack.w(e, target, context, first + i) for i in range(4)]
        halves.append(_half_group(e, target, blocks, x, first))
    scales = unpack.scales(e, target, context)
    acc.set(_accumulate(e, unpack, scales, x, _join(*halves), acc.get()))


def _group_many(e: Emit, target: Target, unpack: Unpack, w: V, tokens: Tokens, acc: V) -> None:
    """Eight blocks of one row for every token of a tile; `acc` holds a vector a token."""
    context = unpack.open(e, target, w)
    blocks = [unpack.w(e, target, context, i) for i in range(4)]
    with e.loop(0, tokens.count) as t:
        e.store(
            _half_group(e, target, blocks, tokens.record(e, t), 0),
            tokens.halves + t * 32,
            align=32,
        )
    blocks = [unpack.w(e, target, context, 4 + i) for i in range(4)]
    scales = unpack.scales(e, target, context)
    with e.loop(0, tokens.count) as t:
        x = tokens.record(e, t)
        half = e.load(I32X8, tokens.halves + t * 32, align=32)
        total = _join(half, _half_group(e, target, blocks, x, 4))
        cell = acc + t * (32 * TILE_ROWS)
        old = e.load(F32X8, cell, align=32)
        e.store(_accumulate(e, unpack, scales, x, total, old), cell, align=32)


class Tokens:
    """The tokens of a tile: their number, the addresses of their records, room for half sums."""

    def __init__(self, count: V, xs: V, offset: V, halves: V) -> None:
        self.count = count
        self.xs = xs
        self.offset = offset
        self.halves = halves

    def record(self, e: Emit, t: V) -> V:
        """Address of a token's record of the current eight blocks."""
        return e.load(I64, self.xs + t * 8, align=8) + self.offset


ROWS_ARGS = 8
"""Arguments of a rows function: w, stride, blocks, tokens, xs, ys, y_offset, rows."""


def emit_rows(module: ir.Module, target: Target, type_name: str) -> str:
    """Define `rows_TYPE(w, stride, blocks, tokens, xs, ys, y_offset, rows)` and return its name.

    Multiplies `rows` weight rows, the first at address `w`, `stride` bytes apart, of `blocks`
    blocks each, with `tokens` (1 to TILE_TOKENS) activation rows. `xs` and `ys` are addresses of
    int64 addresses: of each token's first record, and of its float32 output, where the first row's
    result lies `y_offset` bytes in.
    """
    name = f"rows_{type_name}"
    kind = ir.FunctionType(VOID, [I64] * ROWS_ARGS)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    e = Emit(module, function)
    stripes = e.scratch(32 * TILE_ROWS * TILE_TOKENS)
    halves = e.scratch(32 * TILE_TOKENS)
    tail = e.scratch(GROUP_BYTES[type_name])
    w, stride, blocks, tokens, xs, ys, y_offset, rows = e.args
    shape = Shape(w, stride, blocks, tokens, xs, ys, y_offset, rows)
    work = Work(stripes, halves, tail)
    with e.b.if_else(tokens.compare("==", 1).raw) as (one, many):
        with one:
            _rows_one(e, target, type_name, shape, work)
        with many:
            _rows_many(e, target, type_name, shape, work)
    e.finish()
    return name


class Shape:
    """The arguments of a rows function."""

    def __init__(
        self, w: V, stride: V, blocks: V, tokens: V, xs: V, ys: V, y_offset: V, rows: V
    ) -> None:
        self.w, self.stride, self.blocks, self.rows = w, stride, blocks, rows
        self.tokens, self.xs, self.ys, self.y_offset = tokens, xs, ys, y_offset

    def y(self, e: Emit, t: V) -> V:
        """Address of token `t`'s result for the first row."""
        return e.load(I64, self.ys + t * 8, align=8) + self.y_offset


class Work:
    """Stack memory: stripes [tokens, 8 rows, 8], half sums [tokens, 8], a padded last group."""

    def __init__(self, stripes: V, halves: V, tail: V) -> None:
        self.stripes, self.halves, self.tail = stripes, halves, tail


def copy_tail(e: Emit, type_name: str, shape: Shape, work: Work, row: V, whole: V) -> None:
    """The blocks of `row` after `whole` groups, followed by zero blocks, at `work.tail`."""
    size = GROUP_BYTES[type_name]
    e.clear(work.tail, e.i64(size))
    rest = (shape.blocks - whole * 8) * (size // 8)
    e.copy(work.tail, row + whole * size, rest)


def _rows_one(e: Emit, target: Target, type_name: str, shape: Shape, work: Work) -> None:
    unpack, size = UNPACK[type_name], GROUP_BYTES[type_name]
    x = e.load(I64, shape.xs, align=8)
    y = shape.y(e, e.i64(0))
    whole = shape.blocks // 8
    acc = e.var(F32X8, 0.0)
    with e.loop(0, shape.rows) as r:
        row = shape.w + r * shape.stride
        acc.set(0.0)
        with e.loop(0, whole) as g:
            w = row + g * size
            prefetch(e, type_name, w + AHEAD_ONE)
            _group_one(e, target, unpack, w, x + g * RECORD, acc)
        with e.when((shape.blocks % 8).compare("!=", 0)):
            copy_tail(e, type_name, shape, work, row, whole)
            _group_one(e, target, unpack, work.tail, x + whole * RECORD, acc)
        e.store(acc.get(), work.stripes + (r % 8) * 32, align=32)
        with e.when((r % 8).compare("==", 7)):
            e.store(fold_rows(e, work.stripes), y + (r - 7) * 4, align=4)
    with e.when((shape.rows % 8).compare("!=", 0)):
        _store_rest(e, shape, work.stripes, y)


def _store_rest(e: Emit, shape: Shape, stripes: V, y: V) -> None:
    """Fold the last rows, fewer than eight, and store them one by one."""
    folded = e.scratch(32)
    e.store(fold_rows(e, stripes), folded, align=32)
    rest = shape.rows % 8
    e.copy(y + (shape.rows - rest) * 4, folded, rest * 4)


def _rows_many(e: Emit, target: Target, type_name: str, shape: Shape, work: Work) -> None:
    unpack, size = UNPACK[type_name], GROUP_BYTES[type_name]
    whole = shape.blocks // 8
    with e.loop(0, shape.rows, TILE_ROWS) as first:
        left = shape.rows - first
        rows = e.smin(left, e.i64(TILE_ROWS))
        e.clear(work.stripes, shape.tokens * (32 * TILE_ROWS))
        with e.loop(0, whole) as g:
            tokens = Tokens(shape.tokens, shape.xs, g * RECORD, work.halves)
            with e.loop(0, rows) as r:
                w = shape.w + (first + r) * shape.stride + g * size
                prefetch(e, type_name, w + AHEAD_MANY * size)
                _group_many(e, target, unpack, w, tokens, work.stripes + r * 32)
        with e.when((shape.blocks % 8).compare("!=", 0)):
            tokens = Tokens(shape.tokens, shape.xs, whole * RECORD, work.halves)
            with e.loop(0, rows) as r:
                row = shape.w + (first + r) * shape.stride
                copy_tail(e, type_name, shape, work, row, whole)
                _group_many(e, target, unpack, work.tail, tokens, work.stripes + r * 32)
        folded = e.scratch(32)
        with e.loop(0, shape.tokens) as t:
            y = shape.y(e, t) + first * 4
            e.store(fold_rows(e, work.stripes + t * (32 * TILE_ROWS)), folded, align=32)
            e.copy(y, folded, rows * 4)
