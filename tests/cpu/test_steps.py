"""Compiled norms, rope, routing, attention and the rest against the exact mode's bits."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.kernels import exact, exact_math
from strata_core.kernels.cpu.emit import F32X8
from strata_core.kernels.cpu.functions import FUNCTIONS
from strata_core.kernels.cpu.steps import NOTHING_LATCHED, each, step

GOLDEN = Path(__file__).parents[1] / "arithmetic" / "golden"


@pytest.fixture
def ops():
    g = np.load(GOLDEN / "ops.npz")
    return {name: g[name].copy() for name in g.files}


def bits_of(expected):
    return np.asarray(expected, np.float32).tobytes()


@pytest.fixture(scope="module")
def functions(kernels):
    """The elementary functions as steps over arrays."""
    compiler = kernels.library._compiler
    module = compiler.module("functions")
    for name, make in FUNCTIONS.items():
        with step(module, name, ("x", "out")) as (e, a, begin, end):

            def body(kind, at, e=e, a=a, make=make):
                e.store(make(e, e.load(kind, a.x + at)), a.out + at)

            each(e, end - begin, body)
    code = compiler.compile(module)
    import ctypes

    def apply(name, x):
        out = np.empty_like(x)
        block = np.array([x.ctypes.data, out.ctypes.data], np.int64)
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code.address(name))
        function(block.ctypes.data, 0, len(x))
        return out

    return apply


def equal(got, expected):
    nan = np.isnan(expected)
    return np.isnan(got[nan]).all() and got[~nan].tobytes() == expected[~nan].tobytes()


def test_functions_have_the_golden_bits(functions):
    g = np.load(GOLDEN / "math.npz")
    x = g["x"]
    for name in ("exp", "tanh", "sigmoid"):
        assert equal(functions(name, x), g[name]), name
    assert equal(functions("silu", x[np.isfinite(x)]), g["silu"])
    assert equal(functions("log1p", g["log1p_x"]), g["log1p"])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_functions_of_any_bits_equal_the_exact_mode(functions, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, 2000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        for name in ("exp", "tanh", "sigmoid", "silu"):
            assert equal(functions(name, x), getattr(exact_math, name)(x)), name


def test_rms_norm(kernels, ops):
    out = np.empty_like(ops["x"])
    eps = int(np.float32(1e-6).view(np.int32))
    kernels.call("rms_norm", (), [ops["x"], out, ops["norm_weight"], 2, 128, eps], 3)
    assert out.tobytes() == ops["rms_norm"].tobytes()


@pytest.mark.parametrize("dim", [8, 40, 64, 100, 2048])
def test_rms_norm_of_other_sizes(kernels, dim):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((3, dim)).astype(np.float32)
    w = rng.standard_normal(dim).astype(np.float32)
    out = np.empty_like(x)
    eps = int(np.float32(1e-5).view(np.int32))
    kernels.call("rms_norm", (), [x, out, w, 1, dim, eps], 3)
    assert out.tobytes() == exact.rms_norm(x, w, dim, 1e-5).tobytes()


def test_rope(kernels, ops):
    x = ops["x"]
    kernels.call("rope", (), [x, ops["cos"], ops["sin"], 4, 64, 24], 3)
    assert x.tobytes() == ops["rope"].tobytes()


@pytest.mark.parametrize(("renormalise", "key"), [(1, "weights"), (0, "softmax_weights")])
def test_route(kernels, ops, renormalise, key):
    picks, weights = np.empty((3, 4), np.int32), np.empty((3, 4), np.float32)
    args = [ops["logits"], picks, weights, 40, 4, renormalise, kernels.status, 9]
    kernels.call("route", (), args, 3)
    assert (picks == ops["picks"]).all()
    assert weights.tobytes() == ops[key].tobytes()
    assert kernels.status[0] == NOTHING_LATCHED


@given(
    seed=st.integers(0, 10**6),
    experts=st.sampled_from([8, 60, 64, 128, 130]),
    top_k=st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_route_equals_the_exact_mode(kernels, seed, experts, top_k):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-40, 40, (2, experts)) / 8).astype(np.float32)
    picks, weights = np.empty((2, top_k), np.int32), np.empty((2, top_k), np.float32)
    args = [logits, picks, weights, experts, top_k, 1, kernels.status, 9]
    kernels.call("route", (), args, 2)
    expected = exact.route(logits, top_k, renormalise=True)
    assert (picks == expected[0]).all()
    assert weights.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_route_latches(kernels, bad):
    logits = np.zeros((1, 20), np.float32)
    logits[0, 13] = bad
    picks, weights = np.empty((1, 2), np.int32), np.empty((1, 2), np.float32)
    kernels.call("route", (), [logits, picks, weights, 20, 2, 1, kernels.status, 5], 1)
    assert kernels.status[0] == 5
    kernels.status[0] = NOTHING_LATCHED


def test_small_sums(kernels, ops):
    x, y = ops["x"], ops["y"]
    out = np.empty_like(x)
    kernels.call("silu_mul", (), [x, y, out, 256], 3)
    assert out.tobytes() == ops["silu_mul"].tobytes()
    kernels.call("add", (), [x, y, out, 256], 3)
    assert out.tobytes() == (x + y).tobytes()
    got = x.copy()
    kernels.call("gate_add", (), [got, y, ops["gate"], 256], 3)
    assert got.tobytes() == ops["gate_add"].tobytes()
    got = x.copy()
    kernels.call("combine", (), [got, ops["rows"], ops["weights"], 256, 4], 3)
    assert got.tobytes() == ops["combine"].tobytes()


def test_gather(kernels, ops):
    out = np.empty((2, 256), np.float32)
    kernels.call("gather", (), [ops["x"], np.array([2, 0], np.int32), out, 256], 2)
    assert (out == ops["x"][[2, 0]]).all()


DTYPES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}


class Sequence:
    """Keys and values of one sequence in a KV type, and the places of some tokens in it."""

    def __init__(self, kv_type, layers, context, width):
        shape = (layers, context, width)
        self.k, self.v = np.zeros(shape, DTYPES[kv_type]), np.zeros(shape, DTYPES[kv_type])
        scales = (layers, context, width // 32)
        self.ks, self.vs = np.zeros(scales, np.float16), np.zeros(scales, np.float16)

    def places(self, tokens):
        one = [a.ctypes.data for a in (self.k, self.v, self.ks, self.vs)]
        return np.array([one] * tokens, np.int64)


def attend(kernels, kv_type, k, v, q, positions, window, layer=1):
    """kv_append of everything, then attention and merge: [T, heads, D]."""
    count, kv_heads, dim = k.shape
    tokens, heads, _ = q.shape
    width = kv_heads * dim
    kv = Sequence(kv_type, 3, count, width)
    every = np.arange(count, dtype=np.int32)
    args = [k, v, width, every, kv.places(count), layer * count, kernels.status, 4]
    kernels.call("kv_append", (kv_type,), args, count)
    splits = np.array([-(-count // 256) + 1], np.int64)
    partials = np.full((tokens, heads, int(splits[0]), 8 + dim), np.nan, np.float32)
    places = kv.places(tokens)
    args = [q, partials, positions, places, layer * count, width, kv_heads, heads // kv_heads]
    units = tokens * kv_heads * int(splits[0])
    kernels.call("attention", (kv_type, dim), [*args, window or 0, splits], units)
    out = np.empty_like(q)
    kernels.call("merge", (dim,), [out, partials, positions, heads, window or 0, splits], tokens)
    whole = np.empty_like(q)
    args = [q, whole, positions, places, layer * count, width, kv_heads, heads // kv_heads]
    kernels.call("whole_attention", (kv_type, dim), [*args, window or 0], tokens * kv_heads)
    assert whole.tobytes() == out.tobytes()
    return out


@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
def test_attention_has_the_golden_bits(kernels, kv_type):
    g = np.load(GOLDEN / "attention.npz")
    for key, window in ((kv_type, None), (f"{kv_type}_window", 50)):
        out = attend(kernels, kv_type, g["k"], g["v"], g["q"], g["positions"], window)
        assert out.tobytes() == g[key].tobytes()


@pytest.mark.parametrize("dim", [32, 40, 64, 128])
@pytest.mark.parametrize("window", [None, 33, 256, 700])
def test_attention_equals_the_exact_mode(kernels, dim, window):
    rng = np.random.default_rng(dim)
    k, v = rng.standard_normal((2, 530, 1, dim)).astype(np.float32)
    q = rng.standard_normal((3, 2, dim)).astype(np.float32) * 2
    positions = np.array([0, 290, 529], np.int32)
    out = attend(kernels, "fp16", k, v, q, positions, window)
    kept = exact.kv_round(k, "fp16"), exact.kv_round(v, "fp16")
    assert out.tobytes() == exact.attention(q, *kept, positions, window).tobytes()


@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
@given(seed=st.integers(0, 10**6), exponent=st.integers(-30, 15))
@settings(max_examples=25, deadline=None)
def test_kv_append_rounds_as_the_exact_mode(kernels, kv_type, seed, exponent):
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal((4, 64)), exponent).astype(np.float32)
    kv = Sequence(kv_type, 1, 9, 64)
    positions = np.array([8, 0, 3, 4], np.int32)
    kernels.status[0] = NOTHING_LATCHED
    args = [x, x, 64, positions, kv.places(4), 0, kernels.status, 4]
    kernels.call("kv_append", (kv_type,), args, 4)
    try:
        expected = exact.kv_round(x, kv_type)
    except exact.NotFinite:
        assert kernels.status[0] == 4
        kernels.status[0] = NOTHING_LATCHED
        return
    assert kernels.status[0] == NOTHING_LATCHED
    for stored, scales in ((kv.k, kv.ks), (kv.v, kv.vs)):
        got = stored[0, positions].astype(np.float32)
        if kv_type == "int8":
            got *= np.repeat(scales[0, positions], 32, axis=1).astype(np.float32)
        assert (got == expected).all()


def test_every_half_survives_widening_and_narrowing(kernels):
    """All 65,536 halves: float16 to float32 and back, as numpy does it."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        wide = halves.astype(np.float32)
    target, compiler = kernels.library.target, kernels.library._compiler
    module = compiler.module("halves")
    from strata_core.kernels.cpu.emit import I16, vec

    with step(module, "widen", ("x", "out")) as (e, a, begin, end), e.loop(begin, end, 8) as i:
        e.store(target.widen(e, e.load(vec(I16, 8), a.x + i * 2)), a.out + i * 4)
    with step(module, "narrow", ("x", "out")) as (e, a, begin, end), e.loop(begin, end, 8) as i:
        e.store(target.narrow(e, e.load(F32X8, a.x + i * 4)), a.out + i * 2)
    code = compiler.compile(module)
    import ctypes

    def apply(name, x, out):
        block = np.array([x.ctypes.data, out.ctypes.data], np.int64)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code.address(name))(
            block.ctypes.data, 0, len(x)
        )
        return out

    assert equal(apply("widen", halves, np.empty(2**16, np.float32)), wide)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 2**32, 2**18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ordinary = np.ldexp(rng.standard_normal(2**18), rng.integers(-27, 18, 2**18))
    floats = np.concatenate([floats, ordinary.astype(np.float32), wide])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(np.float16)
    got = apply("narrow", floats, np.empty(len(floats), np.float16))
    nan = np.isnan(expected)
    assert np.isnan(got[nan]).all()
    assert got[~nan].tobytes() == expected[~nan].tobytes()
