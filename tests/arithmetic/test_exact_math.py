"""The elementary functions against float64, within the bounds that docs/arithmetic.md states."""

import numpy as np
import pytest

from strata_core.kernels import exact_math

BOUNDS = {"exp": 1.01, "tanh": 1.4, "log1p": 1.5}


def ulps(got, exact):
    """Distance in units of the last place of the float32 next to `exact`."""
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
    return np.abs(got.astype(np.float64) - exact) / unit


def spread(low, high, n=400_000):
    """Floats over a range, dense near its ends and near 0."""
    rng = np.random.default_rng(5)
    flat = rng.uniform(low, high, n)
    small = np.exp2(rng.uniform(-30, 0, n)) * rng.choice([-1, 1], n)
    x = np.concatenate([flat, small, [low, high, 0.0, -0.0]]).astype(np.float32)
    return x[(x >= low) & (x <= high)]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("exp", -87, 88), ("tanh", -12, 12), ("log1p", -0.999, 1000.0)],
)
def test_error_in_ulps(name, low, high):
    x = spread(low, high)
    worst = ulps(getattr(exact_math, name)(x), getattr(np, name)(x.astype(np.float64))).max()
    assert worst <= BOUNDS[name]


def test_exp_at_its_ends():
    x = np.array([-np.inf, -87.00001, -87, 0, -0.0, 88, 88.00001, np.inf, np.nan], np.float32)
    y = exact_math.exp(x)
    assert y[[0, 1]].tolist() == [0, 0]
    assert not np.signbit(y[[0, 1]]).any()
    assert y[[3, 4]].tolist() == [1, 1]
    assert np.isinf(y[[6, 7]]).all()
    assert np.isnan(y[8])
    assert 1.6e-38 < y[2] < 1.7e-38
    assert 1.6e38 < y[5] < 1.7e38


def test_silu_and_sigmoid_over_the_whole_range():
    x = np.array([-np.inf, -1e30, -100, -1, 0, 1, 100, 1e30, np.inf], np.float32)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(exact_math.sigmoid(x), expected, rtol=3e-7, atol=1e-37)
    silu = exact_math.silu(x)
    np.testing.assert_allclose(silu[1:8], x[1:8] * expected[1:8], rtol=3e-7, atol=1e-30)
    assert silu[8] == np.inf


def test_tanh_is_odd_and_reaches_one():
    x = spread(0, 12, 5000)
    assert (exact_math.tanh(-x) == -exact_math.tanh(x)).all()
    assert exact_math.tanh(np.array([9.1, 50, np.inf], np.float32)).tolist() == [1, 1, 1]
