"""The elementary functions of docs/arithmetic.md, section 5, step by step."""

from __future__ import annotations

import numpy as np

from strata_core.kernels.exact_float import Floats, fma

EXP_LOW, EXP_HIGH = -87.0, 88.0
"""Below the first exp is +0, above the second +infinity."""

LOG2E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62e4p-1")
LN2_LOW = float.fromhex("0x1.7f7d1cp-20")

EXP = tuple(
    map(
        float.fromhex,
        ("0x1.6a5228p-10", "0x1.12396cp-7", "0x1.5558aap-5", "0x1.555492p-3", "0x1.fffffcp-2"),
    )
)
"""(e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, highest power first."""

TANH_SMALL = 0.625
TANH = tuple(
    map(
        float.fromhex,
        ("-0x1.750ce2p-8", "0x1.51f8cep-6", "-0x1.b835a4p-5", "0x1.1106f6p-3", "-0x1.555532p-2"),
    )
)
"""(tanh(x) - x) / x^3 as a polynomial in x^2 on |x| < 0.625."""

SQRT_HALF_BITS = 0x3F3504F3
LOG1P = tuple(
    map(
        float.fromhex,
        (
            "-0x1.38c428p-4",
            "0x1.055e3cp-3",
            "-0x1.0d8302p-3",
            "0x1.22d956p-3",
            "-0x1.54728p-3",
            "0x1.99a01ap-3",
            "-0x1.000226p-2",
            "0x1.555554p-2",
        ),
    )
)
"""(log(1 + f) - f + f^2 / 2) / f^3 on sqrt(1/2) - 1 <= f <= sqrt(2) - 1."""

ONE = np.float32(1)
TWO = np.float32(2)


def _horner(coefficients: tuple[float, ...], x: Floats) -> Floats:
    p = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma(p, x, c)
    return p


def exp(x: Floats) -> Floats:
    """e^x of float32 values, any shape."""
    with np.errstate(all="ignore"):
        inside = np.where((x >= EXP_LOW) & (x <= EXP_HIGH), x, np.float32(0))
        n = np.rint(inside * np.float32(LOG2E))
        r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, inside))
        p = fma(r * r, _horner(EXP, r), r) + ONE
        scaled = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
        outside = np.where(x < EXP_LOW, np.float32(0), x + np.float32(np.inf))
    return np.where((x >= EXP_LOW) & (x <= EXP_HIGH), scaled, outside)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


def silu(x: Floats) -> Floats:
    """x / (1 + e^-x)."""
    with np.errstate(all="ignore"):
        result: Floats = x / (ONE + exp(-x))
    return result


def tanh(x: Floats) -> Floats:
    """Hyperbolic tangent."""
    with np.errstate(all="ignore"):
        y = x * x
        small = fma(x * y, _horner(TANH, y), x)
        large = ONE - TWO / (exp(TWO * np.abs(x)) + ONE)
    return np.where(np.abs(x) < TANH_SMALL, small, np.copysign(large, x))


def log1p(x: Floats) -> Floats:
    """log(1 + x) for -1 < x < 2^100."""
    u = ONE + x
    k = (u.view(np.int32) - np.int32(SQRT_HALF_BITS)) >> 23
    s = ((127 - k).astype(np.int32) << 23).view(np.float32)
    f = fma(x, s, s - ONE)
    z = f * f
    r = fma(f * z, _horner(LOG1P, f), np.float32(-0.5) * z)
    n = k.astype(np.float32)
    return fma(n, LN2_HIGH, f + fma(n, LN2_LOW, r))
