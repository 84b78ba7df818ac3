"""Block products of the exact mode: unpacking against the gguf package, sums and order by hand."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.exact_float import fma
from strata_core.kernels.exact_quant import ONE_PLANE, TWO_PLANES, product, quantise, sums, unpack
from strata_core.kernels.exact_quant import UNPACK as QUANTISED
from strata_core.kernels.exact_quant import values as weight_values

HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_rows(name, rows, columns, seed=0):
    """Random bytes with finite scales, as stored: uint8 [rows * bytes of a row]."""
    kind = TYPES[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        scale = (rng.standard_normal(raw.shape[:2]) * 0.01).astype("<f2")
        raw[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(100, 130, raw.shape[:2])
    return raw.reshape(-1)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_values_equal_the_gguf_package(name):
    data = random_rows(name, 7, 512)
    expected = dequantize(data, GGMLQuantizationType[name]).reshape(7, 512)
    got = weight_values(unpack(name, data, 7, 512))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_extreme_bytes_stay_within_int32(name):
    kind = TYPES[name]
    x = np.full((2, 256), 3.0, np.float32)
    x[1] *= -1
    for byte in (0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0):
        data = np.full(kind.nbytes(256), byte, np.uint8)
        total, _ = sums(unpack(name, data, 1, 256), quantise(x))
        assert (total[0] == -total[1]).all()


def test_largest_q6_k_sum_is_the_documented_one():
    raw = np.zeros(210, np.uint8)
    raw[192:208] = 0x80
    total, _ = sums(unpack("Q6_K", raw, 1, 256), quantise(np.full((1, 256), 1.0, np.float32)))
    assert total.tolist() == [[[2_147_352_576] * 8]]


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_a_row_is_eight_stripes_folded_in_order(name):
    columns = 512 if TYPES[name].block == 256 else 32 * 11
    data = random_rows(name, 3, columns, seed=4)
    x = np.random.default_rng(5).standard_normal((2, columns)).astype(np.float32)
    blocks, act = unpack(name, data, 3, columns), quantise(x)
    total, low = sums(blocks, act)
    for t in range(2):
        for n in range(3):
            stripe = [np.float32(0)] * 8
            for b in range(columns // 32):
                xd, j = act.scale[t, b], b % 8
                if blocks.sign < 0:
                    m = np.float32(low[t, n, b])
                    stripe[j] = fma(-m, blocks.m[n, b] * xd, stripe[j])[()]
                s = np.float32(total[t, n, b])
                stripe[j] = fma(s, blocks.d[n, b] * xd, stripe[j])[()]
                if blocks.sign > 0:
                    m = np.float32(low[t, n, b])
                    stripe[j] = fma(m, blocks.m[n, b] * xd, stripe[j])[()]
            row = stripe[0]
            for s in stripe[1:]:
                row = np.float32(row + s)
            assert product(blocks, act)[t, n] == row


@pytest.mark.parametrize("name", sorted(QUANTISED))
@pytest.mark.parametrize(("largest", "error"), [(TWO_PLANES, 4e-4), (ONE_PLANE, 4e-2)])
def test_products_are_close_to_float64(name, largest, error):
    data = random_rows(name, 16, 1024, seed=6)
    x = np.random.default_rng(7).standard_normal((3, 1024)).astype(np.float32)
    blocks = unpack(name, data, 16, 1024)
    expected = x.astype(np.float64) @ weight_values(blocks).astype(np.float64).T
    got = product(blocks, quantise(x, largest))
    assert np.abs(got - expected).max() <= error * np.abs(expected).max()


@given(st.integers(0, 2**32 - 1), st.integers(-149, 127))
@settings(max_examples=300, deadline=None)
def test_quantisation_of_any_magnitude(seed, exponent):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(rng.uniform(-1, 1, (1, 64)).astype(np.float32), exponent)
    act = quantise(x)
    assert act.finite
    assert np.abs(act.q).max() <= TWO_PLANES
    assert (act.sum == act.q.sum(axis=2)).all()
    assert ((act.scale != 0) | (act.q == 0).all(axis=2)).all()
    back = act.q * act.scale[..., None].astype(np.float64)
    if exponent > -100:
        amax = np.abs(x.reshape(1, 2, 32)).max(axis=2, keepdims=True).astype(np.float64)
        assert (np.abs(back - x.reshape(1, 2, 32)) <= amax * (0.503 / TWO_PLANES)).all()


def test_planes_put_together_are_the_activation():
    q = np.arange(-TWO_PLANES, TWO_PLANES + 1, dtype=np.int32)
    hi, lo = q >> 7, q & 127
    assert (hi * 128 + lo == q).all()
    assert (hi.min(), hi.max(), lo.min(), lo.max()) == (-128, 127, 0, 127)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_seen(bad):
    x = np.ones((1, 64), np.float32)
    x[0, 40] = bad
    assert not quantise(x).finite


def test_zeros_and_vanishing_scales_give_nothing():
    x = np.zeros((1, 64), np.float32)
    x[0, 32:] = np.float32(2.0**-149)
    act = quantise(x)
    assert act.finite
    assert act.q.tolist() == np.zeros((1, 2, 32)).tolist()
    assert act.scale.tobytes() == np.zeros(2, np.float32).tobytes()
