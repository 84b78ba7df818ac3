"""fma without hardware against the C library's, folds and widening against their definitions."""

import ctypes
import ctypes.util
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.kernels.exact_float import dot64, fma, fold8, fold64, sum64, widen

BITS = st.integers(0, 2**32 - 1)


def of_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.fixture(scope="module")
def fmaf():
    name = ctypes.util.find_library("m") or ctypes.util.find_library("msvcrt")
    if name is None:
        pytest.skip("no C library with fmaf found")
    function = ctypes.CDLL(name).fmaf
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * 3
    return function


def same(a, b):
    return a.tobytes() == b.tobytes() or (np.isnan(a) and np.isnan(b))


@given(BITS, BITS, BITS)
@settings(max_examples=1000, deadline=None)
def test_fma_equals_the_c_library(fmaf, a, b, c):
    x, y, z = of_bits(a), of_bits(b), of_bits(c)
    assert same(fma(x, y, z)[()], np.float32(fmaf(x, y, z)))


def near_ties(rng, n):
    """Operands whose exact result lies near the middle between two float32."""
    a = rng.standard_normal(n).astype(np.float32)
    b = rng.standard_normal(n).astype(np.float32)
    exact = a.astype(np.float64) * b
    step = np.exp2(rng.integers(-60, 4, n))
    c = (-exact * (1 + step * rng.choice([-1, 1], n))).astype(np.float32)
    tiny = np.exp2(rng.integers(-149, -100, n)).astype(np.float32)
    return a, b, np.where(rng.random(n) < 0.3, tiny, c).astype(np.float32)


def test_fma_where_sums_cancel(fmaf):
    a, b, c = near_ties(np.random.default_rng(1), 40_000)
    expected = np.array([fmaf(*t) for t in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])
    np.testing.assert_array_equal(fma(a, b, c), expected.astype(np.float32))


def round_to_float32(value):
    """Nearest float32, ties to even, of an exact Fraction in the normal or denormal range."""
    if value == 0:
        return 0.0
    exponent = max(len(bin(abs(value.numerator))) - len(bin(value.denominator)) - 1, -126)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return float(round(value / unit) * unit)


def test_fma_equals_exact_fractions():
    a, b, c = near_ties(np.random.default_rng(2), 3000)
    got = fma(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert float(r) == round_to_float32(exact)


def test_a_double_rounding_case_that_plain_float64_gets_wrong():
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    c = np.float32(2.0**-60)
    naive = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    assert fma(a, b, c)[()] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert naive == np.float32(1 + 2.0**-11)


def test_folds_follow_their_formulas():
    x = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    t = []
    for j in range(8):
        total = x[j]
        for k in range(1, 8):
            total = np.float32(total + x[j + 8 * k])
        t.append(total)
    total = t[0]
    for value in t[1:]:
        total = np.float32(total + value)
    assert fold64(x) == total
    assert fold8(np.array(t)) == total


@given(st.integers(1, 200), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_float_rows_are_64_stripes(length, seed):
    rng = np.random.default_rng(seed)
    w, x = rng.standard_normal((2, length)).astype(np.float32)
    stripes = np.zeros(64, np.float32)
    for i in range(length):
        stripes[i % 64] = fma(w[i], x[i], stripes[i % 64])
    assert dot64(w, x) == fold64(stripes)
    sums = np.zeros(64, np.float32)
    for i in range(length):
        sums[i % 64] += x[i]
    assert sum64(x) == fold64(sums)


def test_halves_and_bfloats_widen_exactly():
    every = np.arange(2**16, dtype="<u2")
    halves = widen("F16", every.view(np.uint8))
    finite = np.isfinite(halves)
    assert (halves[finite].astype(np.float16).view(np.uint16) == every[finite]).all()
    assert (widen("BF16", every.view(np.uint8)).view(np.uint32) >> 16 == every).all()
