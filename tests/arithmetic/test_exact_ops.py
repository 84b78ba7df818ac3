"""Norms, rope, attention, routing and KV rounding of the exact mode against float64 formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.hyper import Rope
from strata_core.kernels import exact
from strata_core.kernels.rope import angles as rope_table


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_attention(q, k, v, positions, window=None):
    """Float64, one softmax over all positions."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for t, p in enumerate(positions):
        first = 0 if window is None else max(0, p - window + 1)
        for h in range(q.shape[1]):
            keys = k[first : p + 1, h // group].astype(np.float64)
            weights = softmax(keys @ q[t, h].astype(np.float64) / np.sqrt(q.shape[2]))
            out[t, h] = weights @ v[first : p + 1, h // group].astype(np.float64)
    return out


@pytest.mark.parametrize("window", [None, 1, 7, 40, 300])
@pytest.mark.parametrize("last", [0, 5, 31, 32, 255, 256, 600])
def test_attention_is_attention(window, last):
    rng = np.random.default_rng(last)
    k, v = rng.standard_normal((2, last + 1, 2, 16)).astype(np.float32)
    positions = np.array(sorted({max(0, last - 1), last}), np.int32)
    q = rng.standard_normal((len(positions), 4, 16)).astype(np.float32) * 3
    got = exact.attention(q, k, v, positions, window)
    np.testing.assert_allclose(got, plain_attention(q, k, v, positions, window), atol=3e-6)


def test_attention_of_a_window_equals_tokens_alone():
    rng = np.random.default_rng(9)
    k, v = rng.standard_normal((2, 270, 1, 16)).astype(np.float32)
    q = rng.standard_normal((5, 2, 16)).astype(np.float32)
    positions = np.arange(265, 270, dtype=np.int32)
    together = exact.attention(q, k, v, positions)
    for t in range(5):
        end = positions[t] + 1
        alone = exact.attention(q[t : t + 1], k[:end], v[:end], positions[t : t + 1])
        assert alone.tobytes() == together[t : t + 1].tobytes()


@pytest.mark.parametrize("dim", [64, 128, 2048, 40])
def test_rms_norm(dim):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((3, dim * 2)).astype(np.float32)
    w = rng.standard_normal(dim).astype(np.float32)
    runs = x.reshape(3, 2, dim).astype(np.float64)
    expected = runs / np.sqrt((runs**2).mean(axis=2, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(
        exact.rms_norm(x, w, dim, 1e-6), expected.reshape(3, -1), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0, 32),
        Rope(1e6, 24),
        Rope(10000.0, 32, "linear", 4.0),
        Rope(10000.0, 32, "yarn", 4.0, 2048),
        Rope(10000.0, 32, "yarn", 4.0, 2048, attention_factor=1.0),
    ],
)
def test_rope_turns_pairs(rope):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 2 * 32)).astype(np.float32)
    cos, sin = rope_table(rope, [0, 5, 1000])
    out = exact.rope(x, cos, sin, heads=2).reshape(3, 2, 32)
    heads, half = x.reshape(3, 2, 32), rope.dim // 2
    pairs = heads[..., :half] + 1j * heads[..., half : rope.dim]
    turned = pairs * (cos.astype(np.float64) + 1j * sin)[:, None]
    np.testing.assert_allclose(out[..., :half], turned.real, atol=1e-6)
    np.testing.assert_allclose(out[..., half : rope.dim], turned.imag, atol=1e-6)
    assert (out[..., rope.dim :] == heads[..., rope.dim :]).all()


def test_yarn_bends_slow_pairs_and_leaves_fast_ones():
    plain = rope_table(Rope(10000.0, 64), [100])
    bent = rope_table(Rope(10000.0, 64, "yarn", 4.0, 2048, attention_factor=1.0), [100])
    slow = rope_table(Rope(10000.0, 64, "linear", 4.0), [100])
    assert bent[0][0, 0] == plain[0][0, 0]
    assert bent[0][0, -1] == slow[0][0, -1]


@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
@settings(max_examples=50, deadline=None)
def test_route_picks_the_largest_and_ties_go_to_the_lowest(seed, top_k, renormalise):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-4, 5, (3, 16)).astype(np.float32) / 4
    picks, weights = exact.route(logits, top_k, renormalise=renormalise)
    p = softmax(logits.astype(np.float64))
    for t in range(3):
        order = sorted(range(16), key=lambda i: (-logits[t, i], i))[:top_k]
        assert picks[t].tolist() == order
        expected = p[t, order] / (p[t, order].sum() if renormalise else 1.0)
        np.testing.assert_allclose(weights[t], expected, rtol=1e-6)


def test_route_latches_what_is_not_finite():
    with pytest.raises(exact.NotFinite, match="route"):
        exact.route(np.array([[0, np.nan]], np.float32), 1, renormalise=True)


def test_kv_types_round_once():
    x = np.random.default_rng(3).standard_normal((5, 2, 64)).astype(np.float32)
    assert exact.kv_round(x, "fp32") is x
    assert (exact.kv_round(x, "fp16") == x.astype(np.float16)).all()
    eight = exact.kv_round(x, "int8")
    amax = np.abs(x.reshape(5, 2, 2, 32)).max(axis=-1, keepdims=True)
    error = np.abs((eight - x).reshape(5, 2, 2, 32))
    assert (error <= amax * (0.51 / 127)).all()
    assert (exact.kv_round(np.zeros_like(x), "int8") == 0).all()


@pytest.mark.parametrize(("kv_type", "value"), [("fp32", np.inf), ("fp16", 1e6), ("int8", 1e8)])
def test_kv_that_cannot_be_kept_is_refused(kv_type, value):
    with pytest.raises(exact.NotFinite, match="kv_append"):
        exact.kv_round(np.full((1, 1, 32), value, np.float32), kv_type)


def test_combine_adds_in_router_order():
    x = np.array([[1.0]], np.float32)
    rows = np.array([[[2.0**25], [1.0], [-(2.0**25)]]], np.float32)
    weights = np.ones((1, 3), np.float32)
    assert exact.combine(x, rows, weights).tolist() == [[1.0]]


def test_linear_with_bias_and_embed_read_the_same_weights():
    rng = np.random.default_rng(4)
    w = rng.standard_normal((6, 64)).astype(np.float16)
    matrix = exact.Matrix("F16", 6, 64, w.view(np.uint8).reshape(-1))
    assert (exact.embed(np.array([4, 0], np.int32), matrix) == w[[4, 0]]).all()
    x = rng.standard_normal((2, 64)).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    expected = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    np.testing.assert_allclose(exact.linear(x, matrix, bias), expected, atol=1e-5)
