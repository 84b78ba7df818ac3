"""Helpers that kernels share: the shape of a step, argument blocks, vector loops, folds.

A step is a compiled function `(args, begin, end)`: `args` is the address of its block of int64
arguments, `begin` and `end` the range of work units to do. Units may be done by any thread in any
order; a step touches no memory that another unit writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from strata_core.kernels.cpu.emit import F32, F32X8, I32, I64, VOID, Emit, V

STEP_TYPE = ir.FunctionType(VOID, [I64, I64, I64])


class Args:
    """The arguments of a step by name; each is one int64 of the block, in this order."""

    def __init__(self, e: Emit, block: V, names: Sequence[str]) -> None:
        self._values = {n: e.load(I64, block, 8 * i, align=8) for i, n in enumerate(names)}

    def __getattr__(self, name: str) -> V:
        return self._values[name]


@contextmanager
def step(module: ir.Module, name: str, names: Sequence[str]) -> Iterator[tuple[Emit, Args, V, V]]:
    """Define the step `name`; the body gets the emitter, the arguments, `begin` and `end`."""
    e = Emit(module, ir.Function(module, STEP_TYPE, name))
    block, begin, end = e.args
    yield e, Args(e, block, names), begin, end
    e.finish()


def each(
    e: Emit, count: V, body: Callable[[ir.Type, V], None], wide: ir.VectorType = F32X8
) -> None:
    """`body(kind, offset)` over `count` floats: vectors like `wide`, then single ones.

    `offset` is in bytes, `kind` the type to load and store there.
    """
    whole = (count // wide.count) * wide.count
    with e.loop(0, whole, wide.count) as i:
        body(wide, i * 4)
    with e.loop(whole, count) as i:
        body(F32, i * 4)


def runs64(e: Emit, bases: Sequence[V], count: V, body: Callable[[int, Sequence[V]], None]) -> None:
    """`body(j, addresses)` for the j-th vector of eight of every 64 floats of some rows.

    `bases` are the rows' addresses, `addresses` those of the 64 floats in turn. What is left after
    the last whole 64 floats is extended with zeros.
    """
    whole = (count // 64) * 64
    with e.loop(0, whole, 64) as i:
        for j in range(8):
            body(j, [base + i * 4 for base in bases])
    pads = [e.scratch(256) for _ in bases]
    with e.when((count % 64).compare("!=", 0)):
        for pad, base in zip(pads, bases, strict=True):
            e.clear(pad, e.i64(256))
            e.copy(pad, base + whole * 4, (count - whole) * 4)
        for j in range(8):
            body(j, pads)


def fold8(stripes: V) -> V:
    """`fold8` of the lanes of a vector."""
    total = stripes[0]
    for lane in range(1, 8):
        total = total + stripes[lane]
    return total


def fold64(stripes: Sequence[V]) -> V:
    """`fold64` of eight vectors: stripe `8 * k + lane` is lane `lane` of vector `k`."""
    total = stripes[0]
    for vector in stripes[1:]:
        total = total + vector
    return fold8(total)


def latch(e: Emit, status: V, op: V) -> None:
    """Record that op number `op` met a value that is not finite; the lowest number stays."""
    pointer = e.b.inttoptr(status.raw, ir.PointerType())
    e.b.atomic_rmw("umin", pointer, op.trunc(I32).raw, "monotonic")


NOTHING_LATCHED = 0xFFFFFFFF
"""The status word (uint32) before anything was latched."""
