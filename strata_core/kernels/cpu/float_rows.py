"""Rows of float weights times windows of float activations: docs/arithmetic.md, section 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from strata_core.kernels.cpu.emit import F32X8, I16, I32X8, I64, VOID, Emit, V, Var, vec
from strata_core.kernels.cpu.products import ROWS_ARGS
from strata_core.kernels.cpu.steps import fold64
from strata_core.kernels.cpu.target import Target

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

LoadEight = Callable[[V, int], V]


def load_eight(e: Emit, target: Target, type_name: str) -> LoadEight:
    """A function `(address, element offset)` that loads eight stored weights as floats."""

    def f32(at: V, offset: int) -> V:
        return e.load(F32X8, at, offset * 4)

    def f16(at: V, offset: int) -> V:
        return target.widen(e, e.load(vec(I16, 8), at, offset * 2))

    def bf16(at: V, offset: int) -> V:
        return (e.load(vec(I16, 8), at, offset * 2).zext(I32X8) << 16).bits(F32X8)

    return {"F32": f32, "F16": f16, "BF16": bf16}[type_name]


def emit_float_rows(module: ir.Module, target: Target, type_name: str) -> str:
    """Define `rows_TYPE(w, stride, columns, tokens, xs, ys, y_offset, rows)`; return its name.

    As `emit_rows`, but the activation rows at the addresses in `xs` are float32 [columns].
    """
    name = f"rows_{type_name}"
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * ROWS_ARGS), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    e = Emit(module, function)
    w, stride, columns, tokens, xs, ys, y_offset, rows = e.args
    size = ELEMENT_BYTES[type_name]
    load = load_eight(e, target, type_name)
    whole = (columns // 64) * 64
    rest = columns - whole
    w_pad, x_pad = e.scratch(256), e.scratch(256)
    with e.loop(0, rows) as r, e.loop(0, tokens) as t:
        row = w + r * stride
        x = e.load(I64, xs + t * 8, align=8)
        stripes = [e.var(F32X8, 0.0) for _ in range(8)]

        def run(at: Sequence[V], stripes: Sequence[Var] = stripes) -> None:
            for j, s in enumerate(stripes):
                product = e.fma(load(at[0], 8 * j), e.load(F32X8, at[1], 32 * j), s.get())
                s.set(product)

        with e.loop(0, whole, 64) as i:
            run([row + i * size, x + i * 4])
        with e.when(rest.compare("!=", 0)):
            e.clear(w_pad, e.i64(256))
            e.clear(x_pad, e.i64(256))
            e.copy(w_pad, row + whole * size, rest * size)
            e.copy(x_pad, x + whole * 4, rest * 4)
            run([w_pad, x_pad])
        y = e.load(I64, ys + t * 8, align=8) + y_offset
        e.store(fold64([s.get() for s in stripes]), y + r * 4)
    e.finish()
    return name
