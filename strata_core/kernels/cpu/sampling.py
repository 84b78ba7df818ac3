"""The compiled sampler: from float32 scores to a token, docs/arithmetic.md, section 12.

Weights are whole numbers, so sums have no order and the passes may take any. The largest scores are
found by radix: each of three passes settles some bits of the last kept one, among fewer and fewer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from strata_core.kernels.cpu import functions
from strata_core.kernels.cpu.emit import (
    F32,
    F32X8,
    F64,
    I32,
    I64,
    I128,
    VOID,
    Emit,
    V,
    Var,
    vec,
)
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.steps import Args, each, step

WEIGHT_BITS = 40
"""The likeliest token weighs 2 to this power."""

NONE_FINITE = -1
"""The token where a score is no number or the largest is not finite."""


class Block(ctypes.Structure):
    """The arguments of `sample`, each of eight bytes, and its answer.

    `scores`: the address of float32 [count]; `weights`, `ids`: those of room for int64 [count];
    `token`: that of the answer. `top_k` 0 and `top_p` 1 keep all.
    """

    _fields_ = (
        ("scores", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_weight", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_int64),
        ("weights", ctypes.c_int64),
        ("ids", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("answer", ctypes.c_int64),
    )


NAMES = tuple(name for name, _ in Block._fields_[:-1])

I64X8, F64X8 = vec(I64, 8), vec(F64, 8)
F32X32 = vec(F32, 32)
"""Wide enough that the next vector need not wait for the comparison of the last."""

RADIX = ((21, 11), (10, 11), (0, 10))
"""Shift and number of the key's bits that each pass settles."""

INFINITE = 0x7F800000

LARGEST_INT = (1 << 63) - 1


def emit_sampler(module: ir.Module) -> None:
    """`sample`: one unit, which reads the scores and writes the token."""
    _emit_keep_largest(module)
    with step(module, "sample", NAMES) as (e, a, _begin, _end):
        e.store(e.i64(NONE_FINITE), a.token, align=8)
        high, bits = _largest(e, a)
        finite = (bits <= INFINITE) & (e.abs(high) < float("inf"))
        with e.when(finite):
            greedy = a.temperature.bits(F64).compare("==", 0.0)
            with e.b.if_else(greedy.raw) as (first, drawn):
                with first:
                    e.store(_first_equal(e, a, high), a.token, align=8)
                with drawn:
                    _weigh(e, a, high)
                    _filter(e, a)
                    e.store(_draw(e, a), a.token, align=8)


def _largest(e: Emit, a: Args) -> tuple[V, V]:
    """The largest score, and the largest magnitude's bits, which tell a NaN."""
    lowest = float("-inf")
    highs = {F32X32: e.var(F32X32, lowest), F32: e.var(F32, lowest)}
    sizes = {F32X32: e.var(vec(I32, 32), 0), F32: e.var(I32, 0)}

    def look(kind: ir.Type, at: V) -> None:
        value, high, size = e.load(kind, a.scores + at), highs[kind], sizes[kind]
        high.set(e.select(value > high.get(), value, high.get()))
        bits = value.bits(size.kind) & 0x7FFFFFFF
        size.set(e.umax(size.get(), bits))

    each(e, a.count, look, F32X32)
    high, size = highs[F32].get(), sizes[F32].get()
    for lane in range(F32X32.count):
        value = highs[F32X32].get()[lane]
        high = e.select(value > high, value, high)
        size = e.umax(size, sizes[F32X32].get()[lane])
    return high, size


def _first_equal(e: Emit, a: Args, high: V) -> V:
    """The lowest id whose score is the largest."""
    i, wide = e.var(I64, 0), e.splat(high, F32X32.count)
    with e.forever() as leave_if:
        leave_if(i.get() + 32 > a.count)
        found = e.load(F32X32, a.scores + i.get() * 4).compare("==", wide).bits(I32)
        leave_if(found.compare("!=", 0))
        i.set(i.get() + 32)
    with e.forever() as leave_if:
        leave_if(e.load(F32, a.scores + i.get() * 4).compare("==", high))
        i.set(i.get() + 1)
    return i.get()


def _weigh(e: Emit, a: Args, high: V) -> None:
    """exp((score - largest) / temperature) of every id, as a whole number."""
    kinds = {F32X8: (F64X8, I64X8), F32: (F64, I64)}
    top, temperature = high.widen(F64), a.temperature.bits(F64)

    def weigh(kind: ir.Type, at: V) -> None:
        double, integer = kinds[kind]
        by = (e.splat(top), e.splat(temperature)) if kind is F32X8 else (top, temperature)
        power = ((e.load(kind, a.scores + at).widen(double) - by[0]) / by[1]).narrow(kind)
        weight = functions.exp(e, power) * float(1 << WEIGHT_BITS)
        e.store(weight.to_int(integer), a.weights + at * 2)

    each(e, a.count, weigh)


def _total(e: Emit, a: Args) -> V:
    """The sum of all weights."""
    sums = {F32X8: e.var(I64X8, 0), F32: e.var(I64, 0)}

    def add(kind: ir.Type, at: V) -> None:
        total = sums[kind]
        total.set(total.get() + e.load(total.kind, a.weights + at * 2))

    each(e, a.count, add)
    return sums[F32].get() + _across(sums[F32X8].get())


def _across(eight: V) -> V:
    total = eight[0]
    for lane in range(1, 8):
        total = total + eight[lane]
    return total


def _filter(e: Emit, a: Args) -> None:
    """`top_k`, then `top_p`, then `min_p`: what they leave out weighs nothing."""
    before = [a.scores, a.weights, a.ids, a.count]
    with e.when((a.top_k > 0) & (a.top_k < a.count)):
        e.call("keep_largest", VOID, *before, a.top_k, e.i64(0))
    share = a.top_p.bits(F64)
    with e.when(share < 1.0):
        total = _total(e, a)
        part = (share * total.to_float(F64)).to_int(I64)
        need = e.select(part > total, total, part)
        need = e.select(need < 1, e.i64(1), need)
        e.call("keep_largest", VOID, *before, need, e.i64(1))
    with e.when(a.min_weight > 0):

        def cut(kind: ir.Type, at: V) -> None:
            integer = I64X8 if kind is F32X8 else I64
            least = e.splat(a.min_weight) if kind is F32X8 else a.min_weight
            weight = e.load(integer, a.weights + at * 2)
            e.store(e.select(weight < least, e.const(integer, 0), weight), a.weights + at * 2)

        each(e, a.count, cut)


def _draw(e: Emit, a: Args) -> V:
    """The first id at which the running sum of weights exceeds the random share of all."""
    number = _philox(e, a.seed, a.position + 1) >> 11
    point = ((number.zext(I128) * _total(e, a).zext(I128)) >> 53).trunc(I64)
    i, running = e.var(I64, 0), e.var(I64, 0)
    with e.forever() as leave_if:
        leave_if(i.get() + 64 > a.count)
        at = a.weights + i.get() * 8
        block = e.load(I64X8, at)
        for j in range(1, 8):
            block = block + e.load(I64X8, at, 64 * j)
        after = running.get() + _across(block)
        leave_if(after > point)
        running.set(after)
        i.set(i.get() + 64)
    with e.forever() as leave_if:
        running.set(running.get() + e.load(I64, a.weights + i.get() * 8, align=8))
        leave_if(running.get() > point)
        i.set(i.get() + 1)
    return i.get()


def _philox(e: Emit, key: V, counter: V) -> V:
    """The first word of Philox4x64-10 for the key `(key, 0)` and the counter `(counter, 0, 0, 0)`.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    zero = e.i64(0)
    c, k = [counter, zero, zero, zero], [key, zero]
    for _ in range(10):
        a = c[0].zext(I128) * 0xD2E7470EE14C6C93
        b = c[2].zext(I128) * 0xCA5A826395121157
        upper_a, upper_b = (a >> 64).trunc(I64), (b >> 64).trunc(I64)
        c = [upper_b ^ c[1] ^ k[0], b.trunc(I64), upper_a ^ c[3] ^ k[1], a.trunc(I64)]
        k = [k[0] + 0x9E3779B97F4A7C15, k[1] + 0xBB67AE8584CAA73B]
    return c[0]


def _key(e: Emit, scores: V, i: V) -> V:
    """A score as a whole number in the same order; -0 becomes +0 first, which it equals."""
    bits = (e.load(F32, scores + i * 4, align=4) + 0.0).bits(I32)
    return (bits ^ (bits.sar(31) & 0x7FFFFFFF) ^ -0x80000000).zext(I64)


def _score(key: V) -> V:
    """The score that a key stands for."""
    bits = key.trunc(I32) ^ -0x80000000
    return (bits ^ (bits.sar(31) & 0x7FFFFFFF)).bits(F32)


KEEP_ARGS = 6


def _emit_keep_largest(module: ir.Module) -> None:
    """`keep_largest(scores, weights, ids, count, target, by_weight)`: the rest weighs nothing then.

    Kept are the largest scores, of equals the lowest ids, until their number, or with `by_weight`
    their weights' sum, reaches `target`, which all together do. `ids` is room for int64 [count].
    """
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * KEEP_ARGS), "keep_largest")
    function.linkage = "internal"
    e = Emit(module, function)
    scores, weights, ids, count, target, by_weight = e.args
    rest, last, found = e.var(I64, target), e.var(I64, 0), e.var(I64, count)

    def measure(i: V) -> V:
        weight = e.load(I64, weights + i * 8, align=8)
        return e.select(by_weight.compare("!=", 0), weight, e.i64(1))

    for number, (shift, bits) in enumerate(RADIX):
        # the ids whose upper bits are settled: at first all, then those listed
        among, settled = found.get(), last.get()

        def member(k: V, number: int = number) -> V:
            return e.load(I64, ids + k * 8, align=8) if number else k

        digit = _settle(e, (scores, shift, bits), among, member, measure, rest)
        last.set((settled << bits) | digit)
        found.set(0)
        with e.loop(0, among) as k:
            i = member(k)
            e.store(i, ids + found.get() * 8, align=8)
            same = (_key(e, scores, i) >> shift).compare("==", last.get())
            found.set(found.get() + same.zext(I64))
    least = _score(last.get())

    def cut(kind: ir.Type, at: V) -> None:
        integer, by = (I64X8, e.splat(least)) if kind is F32X8 else (I64, least)
        weight = e.load(integer, weights + at * 2)
        below = e.load(kind, scores + at) < by
        e.store(e.select(below, e.const(integer, 0), weight), weights + at * 2)

    each(e, count, cut)
    with e.loop(0, found.get()) as k:
        i = e.load(I64, ids + k * 8, align=8)
        weight = measure(i)
        with e.when(rest.get() <= 0):
            e.store(e.i64(0), weights + i * 8, align=8)
        rest.set(rest.get() - weight)
    e.finish()


def _settle(
    e: Emit,
    place: tuple[V, int, int],
    among: V,
    member: Callable[[V], V],
    measure: Callable[[V], V],
    rest: Var,
) -> V:
    """The largest digit of the keys at which those with it or a larger one reach `rest`.

    `place` is (scores, shift, bits) of the digit. What lies above it is taken from `rest`.
    """
    scores, shift, bits = place
    sums = e.scratch(8 << bits)
    e.clear(sums, e.i64(8 << bits))
    with e.loop(0, among) as k:
        i = member(k)
        cell = sums + ((_key(e, scores, i) >> shift) & ((1 << bits) - 1)) * 8
        e.store(e.load(I64, cell, align=8) + measure(i), cell, align=8)
    digit = e.var(I64, (1 << bits) - 1)
    with e.forever() as leave_if:
        here = e.load(I64, sums + digit.get() * 8, align=8)
        leave_if(here >= rest.get())
        rest.set(rest.get() - here)
        digit.set(digit.get() - 1)
    return digit.get()


class CompiledDraw:
    """The sampler's code with its argument block and room for weights. One thread at a time.

    `settle` comes before the first draw; what it says stands until it is called again.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._code = compiler.obtain("sampler", emit_sampler)
        self._run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(self._code.address("sample"))
        self._block = Block()
        self._at = ctypes.addressof(self._block)
        self._block.token = self._at + Block.answer.offset
        self._room = np.zeros((2, 0), np.int64)

    def settle(
        self, temperature: float, top_k: int, top_p: float, min_weight: int, seed: int
    ) -> None:
        """How tokens are drawn from now on; after an error that is undefined until called again."""
        block = self._block
        block.temperature = temperature
        block.top_k = min(int(top_k), LARGEST_INT)
        block.top_p = top_p
        block.min_weight = min_weight
        block.seed = int(seed)

    def __call__(self, scores: NDArray[np.float32], position: int) -> int:
        """The token of contiguous `scores` [count], or NONE_FINITE."""
        block, count = self._block, len(scores)
        if self._room.shape[1] < count:
            self._room = np.zeros((2, count), np.int64)
            block.weights, block.ids = (half.ctypes.data for half in self._room)
        block.scores = _address(scores)
        block.count = count
        block.position = position
        self._run(self._at, 0, 1)
        return int(block.answer)


def _address(floats: NDArray[np.float32]) -> int:
    """Where they begin. `ctypes.data` says it too, by six times as much code."""
    if floats.flags.writeable:
        return ctypes.addressof(ctypes.c_float.from_buffer(floats.data))
    return floats.ctypes.data
