"""The elementary functions of docs/arithmetic.md, section 5, on vectors of floats."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from strata_core.kernels.cpu.emit import I32, Emit, V, vec
from strata_core.kernels.exact_math import (
    EXP,
    EXP_HIGH,
    EXP_LOW,
    LN2_HIGH,
    LN2_LOW,
    LOG1P,
    LOG2E,
    SQRT_HALF_BITS,
    TANH,
    TANH_SMALL,
)

INFINITY = float("inf")


def _integers(kind: ir.Type) -> ir.Type:
    return vec(I32, kind.count) if isinstance(kind, ir.VectorType) else I32


def _horner(e: Emit, coefficients: Sequence[float], x: V) -> V:
    p = e.const(x.type, coefficients[0])
    for c in coefficients[1:]:
        p = e.fma(p, x, e.const(x.type, c))
    return p


def exp(e: Emit, x: V) -> V:
    """e^x."""
    number, integer = x.type, _integers(x.type)
    inside = e.select(x >= EXP_LOW, x, e.const(number, 0.0))
    inside = e.select(inside <= EXP_HIGH, inside, e.const(number, 0.0))
    n = e.rint(inside * LOG2E)
    r = e.fma(n, e.const(number, -LN2_HIGH), inside)
    r = e.fma(n, e.const(number, -LN2_LOW), r)
    p = e.fma(r * r, _horner(e, EXP, r), r) + 1.0
    scaled = (p.bits(integer) + (n.to_int(integer) << 23)).bits(number)
    # x + infinity keeps a NaN and is infinity for everything above the range
    outside = e.select(x < EXP_LOW, e.const(number, 0.0), x + INFINITY)
    within = (x >= EXP_LOW) & (x <= EXP_HIGH)
    return e.select(within, scaled, outside)


def sigmoid(e: Emit, x: V) -> V:
    """1 / (1 + e^-x)."""
    return e.const(x.type, 1.0) / (exp(e, -x) + 1.0)


def silu(e: Emit, x: V) -> V:
    """x / (1 + e^-x)."""
    return x / (exp(e, -x) + 1.0)


def tanh(e: Emit, x: V) -> V:
    """Hyperbolic tangent."""
    y = x * x
    small = e.fma(x * y, _horner(e, TANH, y), x)
    size = e.abs(x)
    large = e.const(x.type, 1.0) - e.const(x.type, 2.0) / (exp(e, size * 2.0) + 1.0)
    return e.select(size < TANH_SMALL, small, e.copysign(large, x))


def log1p(e: Emit, x: V) -> V:
    """log(1 + x) for -1 < x < 2^100."""
    number, integer = x.type, _integers(x.type)
    u = x + 1.0
    k = (u.bits(integer) - SQRT_HALF_BITS).sar(23)
    s = ((e.const(integer, 127) - k) << 23).bits(number)
    f = e.fma(x, s, s - 1.0)
    z = f * f
    r = e.fma(f * z, _horner(e, LOG1P, f), z * -0.5)
    n = k.to_float(number)
    return e.fma(n, e.const(number, LN2_HIGH), f + e.fma(n, e.const(number, LN2_LOW), r))


FUNCTIONS = {"exp": exp, "tanh": tanh, "sigmoid": sigmoid, "silu": silu, "log1p": log1p}
"""Every elementary function by name."""
