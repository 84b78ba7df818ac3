"""Steps whose unit is a row of a buffer: norms, rope, routing, combining and small sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from llvmlite import ir

from strata_core.kernels.cpu import functions
from strata_core.kernels.cpu.emit import F32, F32X8, I1, I16, I32, I32X8, I64, Emit, V, Var, vec
from strata_core.kernels.cpu.products import RECORD, RECORD_SCALES, RECORD_SUMS
from strata_core.kernels.cpu.steps import each, fold64, latch, runs64, step


def emit_rms_norm(module: ir.Module) -> None:
    """`rms_norm`: rows of `runs` runs of `dim` floats; the weight is float32 [dim]."""
    names = ("x", "out", "weight", "runs", "dim", "eps")
    with step(module, "rms_norm", names) as (e, a, begin, end):
        eps = a.eps.trunc(I32).bits(F32)
        with e.loop(begin * a.runs, end * a.runs) as run:
            x = a.x + run * a.dim * 4
            out = a.out + run * a.dim * 4
            stripes = [e.var(F32X8, 0.0) for _ in range(8)]

            def square(j: int, at: Sequence[V], stripes: list[Var] = stripes) -> None:
                value = e.load(F32X8, at[0], 32 * j)
                stripes[j].set(e.fma(value, value, stripes[j].get()))

            runs64(e, [x], a.dim, square)
            total = fold64([s.get() for s in stripes])
            mean = total / V(e, e.b.sitofp(a.dim.raw, F32))
            factor = e.const(F32, 1.0) / e.sqrt(mean + eps)
            wide = e.splat(factor)

            def scale(kind: ir.Type, at: V, x: V = x, out: V = out) -> None:
                by = wide if kind is F32X8 else factor
                value = e.load(kind, x + at) * by * e.load(kind, a.weight + at)
                e.store(value, out + at)

            each(e, a.dim, scale)


def emit_rope(module: ir.Module) -> None:
    """`rope`: the pairs (i, i + half) of each head by the row's line of the cos and sin tables."""
    names = ("x", "cos", "sin", "heads", "head_dim", "half")
    with step(module, "rope", names) as (e, a, begin, end), e.loop(begin, end) as row:
        cos, sin = a.cos + row * a.half * 4, a.sin + row * a.half * 4
        with e.loop(row * a.heads, (row + 1) * a.heads) as head:
            low = a.x + head * a.head_dim * 4
            high = low + a.half * 4

            def turn(kind: ir.Type, at: V) -> None:
                x, y = e.load(kind, low + at), e.load(kind, high + at)
                c, s = e.load(kind, cos + at), e.load(kind, sin + at)
                e.store(e.fma(-y, s, x * c), low + at)
                e.store(e.fma(y, c, x * s), high + at)

            each(e, a.half, turn)


def _rowwise(
    module: ir.Module,
    name: str,
    buffers: tuple[str, ...],
    compute: Callable[[Emit, list[V]], V],
) -> None:
    """A step `out = compute(buffers)` over rows of `width` floats."""
    with step(module, name, (*buffers, "out", "width")) as (e, a, begin, end):
        start = begin * a.width * 4

        def body(kind: ir.Type, at: V) -> None:
            values = [e.load(kind, getattr(a, b) + start + at) for b in buffers]
            e.store(compute(e, values), a.out + start + at)

        each(e, (end - begin) * a.width, body)


def emit_add(module: ir.Module) -> None:
    """`add`: x + y."""
    _rowwise(module, "add", ("x", "y"), lambda _, v: v[0] + v[1])


def emit_silu_mul(module: ir.Module) -> None:
    """`silu_mul`: silu(gate) * up."""
    _rowwise(module, "silu_mul", ("gate", "up"), lambda e, v: functions.silu(e, v[0]) * v[1])


def emit_gate_add(module: ir.Module) -> None:
    """`gate_add`: x + sigmoid(gate) * y, one gate a row."""
    names = ("x", "y", "gate", "width")
    with step(module, "gate_add", names) as (e, a, begin, end), e.loop(begin, end) as row:
        one = functions.sigmoid(e, e.load(F32, a.gate + row * 4))
        eight = e.splat(one)
        start = row * a.width * 4

        def body(kind: ir.Type, at: V) -> None:
            x, y = e.load(kind, a.x + start + at), e.load(kind, a.y + start + at)
            e.store(e.fma(eight if kind is F32X8 else one, y, x), a.x + start + at)

        each(e, a.width, body)


def emit_combine(module: ir.Module) -> None:
    """`combine`: x + the weighted rows, added in router order."""
    names = ("x", "rows", "weights", "width", "top_k")
    with step(module, "combine", names) as (e, a, begin, end), e.loop(begin, end) as row:
        x = a.x + row * a.width * 4
        rows = a.rows + row * a.top_k * a.width * 4
        weights = a.weights + row * a.top_k * 4

        def body(kind: ir.Type, at: V) -> None:
            acc = e.var(kind, 0.0)
            with e.loop(0, a.top_k) as k:
                one = e.load(F32, weights + k * 4)
                weight = e.splat(one) if kind is F32X8 else one
                value = e.load(kind, rows + k * a.width * 4 + at)
                acc.set(e.fma(weight, value, acc.get()))
            e.store(e.load(kind, x + at) + acc.get(), x + at)

        each(e, a.width, body)


def emit_gather(module: ir.Module) -> None:
    """`gather`: row `index[i]` of x becomes row i of out."""
    names = ("x", "index", "out", "width")
    with step(module, "gather", names) as (e, a, begin, end), e.loop(begin, end) as row:
        at = e.load(I32, a.index + row * 4).sext(I64)
        size = a.width * 4
        e.copy(a.out + row * size, a.x + at * size, size)


MOST_EXPERTS = 1024
"""Experts of a layer that `route` has room for."""


def emit_route(module: ir.Module) -> None:
    """`route`: softmax over `experts` logits, the `top_k` largest logits and their weights."""
    names = (
        "logits",
        "picks",
        "weights",
        "experts",
        "top_k",
        "renormalise",
        "status",
        "op",
    )
    with step(module, "route", names) as (e, a, begin, end):
        work = e.scratch(4 * MOST_EXPERTS)
        with e.loop(begin, end) as row:
            logits = a.logits + row * a.experts * 4
            _copy_checked(e, a.experts, logits, work, a.status, a.op)
            high = _largest(e, a.experts, work)
            total = _softmax_sum(e, a.experts, work, high)
            picks = a.picks + row * a.top_k * 4
            weights = a.weights + row * a.top_k * 4
            with e.loop(0, a.top_k) as k:
                best = _take_largest(e, a.experts, work)
                e.store(best.trunc(I32), picks + k * 4)
                p = functions.exp(e, e.load(F32, logits + best * 4) - high) / total
                e.store(p, weights + k * 4)
            with e.when(a.renormalise.compare("!=", 0)):
                _renormalise(e, a.top_k, weights)


def _padded_count(experts: V) -> V:
    return ((experts + 63) // 64) * 64


def _copy_checked(e: Emit, experts: V, logits: V, work: V, status: V, op: V) -> None:
    """Copy the logits to `work`, -infinity up to a multiple of 64; latch what is not finite."""
    with e.loop(0, _padded_count(experts), 8) as i:
        e.store(e.const(F32X8, float("-inf")), work + i * 4)
    e.copy(work, logits, experts * 4)
    bad = e.var(I1, False)
    with e.loop(0, experts) as i:
        exponent = e.load(I32, logits + i * 4) & 0x7F800000
        bad.set(bad.get() | exponent.compare("==", 0x7F800000))
    with e.when(bad.get()):
        latch(e, status, op)


def _largest(e: Emit, experts: V, work: V) -> V:
    high = e.var(F32, float("-inf"))
    with e.loop(0, experts) as i:
        value = e.load(F32, work + i * 4)
        high.set(e.select(value > high.get(), value, high.get()))
    return high.get()


def _softmax_sum(e: Emit, experts: V, work: V, high: V) -> V:
    stripes = [e.var(F32X8, 0.0) for _ in range(8)]
    wide = e.splat(high)
    with e.loop(0, _padded_count(experts), 64) as i:
        for j in range(8):
            power = functions.exp(e, e.load(F32X8, work + i * 4, 32 * j) - wide)
            stripes[j].set(stripes[j].get() + power)
    return fold64([s.get() for s in stripes])


def _take_largest(e: Emit, experts: V, work: V) -> V:
    """Index of the largest value, the lowest of equals; it becomes -infinity."""
    high, best = e.var(F32, float("-inf")), e.var(I64, 0)
    with e.loop(0, experts) as i:
        value = e.load(F32, work + i * 4)
        larger = value > high.get()
        high.set(e.select(larger, value, high.get()))
        best.set(e.select(larger, i, best.get()))
    e.store(e.const(F32, float("-inf")), work + best.get() * 4)
    return best.get()


def _renormalise(e: Emit, top_k: V, weights: V) -> None:
    total = e.var(F32, e.load(F32, weights))
    with e.loop(1, top_k) as k:
        total.set(total.get() + e.load(F32, weights + k * 4))
    with e.loop(0, top_k) as k:
        e.store(e.load(F32, weights + k * 4) / total.get(), weights + k * 4)


Layout = Literal["rows", "tiles"]
"""How a record is laid out: as `products.py` or as `tiles.py` reads it."""


def emit_quantise(module: ir.Module, name: str, largest: int, layout: Layout) -> None:
    """`name`: float rows of `width` (a multiple of 32) to records; docs/arithmetic.md, 2.

    The records of a row are `pitch` bytes after those of the row before; blocks that the last
    record has beyond the row are left as they are (the buffer starts as zeros).
    """
    names = ("x", "pack", "width", "pitch", "status", "op")
    with step(module, name, names) as (e, a, begin, end), e.loop(begin, end) as row:
        x, pack = a.x + row * a.width * 4, a.pack + row * a.pitch
        with e.loop(0, a.width // 32) as b:
            bad = quantise_block(e, x + b * 128, pack, b, largest, layout)
            with e.when(bad):
                latch(e, a.status, a.op)


def quantise_block(e: Emit, x: V, pack: V, block: V, largest: int, layout: Layout) -> V:
    """Quantise the 32 floats at `x` as block number `block` of the records at `pack`.

    Returns whether a value was not finite (an int1).
    """
    values = [e.load(F32X8, x, 32 * j) for j in range(4)]
    sizes = [v.bits(I32X8) & 0x7FFFFFFF for v in values]
    amax = _lane_max(e, e.umax(e.umax(sizes[0], sizes[1]), e.umax(sizes[2], sizes[3])))
    bad = amax >= 0x7F800000
    largest_float = e.const(F32, float(largest))
    scale = amax.bits(F32) / largest_float
    inverse = largest_float / amax.bits(F32)
    # with nothing to multiply by, zeros stand for the block (and for one that is not finite)
    usable = (scale > 0.0) & (inverse < float("inf")) & (amax < 0x7F800000)
    factor = e.splat(e.select(usable, inverse, e.const(F32, 0.0)))
    zero = e.const(F32X8, 0.0)
    q = [e.rint(e.select(e.splat(usable), v, zero) * factor) for v in values]
    ints = [v.to_int() for v in q]
    record = pack + (block // 8) * RECORD
    lane = block % 8
    for j, value in enumerate(ints):
        words = value.trunc(vec(I16, 8))
        if layout == "rows":
            e.store(words, record + lane * 64, 16 * j)
        else:
            pairs = words.bits(vec(I32, 4))
            for k in range(4):
                e.store(pairs[k], record + lane * 4, 32 * (4 * j + k))
    e.store(e.select(usable, scale, e.const(F32, 0.0)), record + lane * 4, RECORD_SCALES)
    total = _lane_sum((ints[0] + ints[1]) + (ints[2] + ints[3]))
    kept = total if layout == "rows" else total.to_float(F32)
    e.store(kept, record + lane * 4, RECORD_SUMS)
    return bad


def _lane_max(e: Emit, v: V) -> V:
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        v = e.umax(v, v.shuffle(None, lanes))
    return v[0]


def _lane_sum(v: V) -> V:
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        v = v + v.shuffle(None, lanes)
    return v[0]
