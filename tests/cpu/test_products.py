"""Compiled products have the bits of the golden vectors, for every type, variant and window."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact, exact_quant
from strata_core.kernels.cpu.products import RECORD_SCALES, RECORD_SUMS
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.unpack import UNPACK

GOLDEN = Path(__file__).parents[1] / "arithmetic" / "golden"
QUANTISED = sorted(UNPACK)
FLOATS = ["BF16", "F16", "F32"]


def golden(name):
    return np.load(GOLDEN / f"{name}.npz")


def same_bits(got, expected):
    """Equal bits; where a NaN is expected any NaN will do."""
    nan = np.isnan(expected)
    return np.isnan(got[nan]).all() and got[~nan].tobytes() == expected[~nan].tobytes()


def unpacked(pack, width):
    """q int16 [T, width], scales and sums [T, blocks] out of records."""
    blocks = width // 32
    records = pack[:, : -(-blocks // 8) * 576].reshape(len(pack), -1, 576)

    def field(start, stop, dtype, per_block):
        flat = np.ascontiguousarray(records[:, :, start:stop]).view(dtype)
        return flat.reshape(len(pack), -1)[:, : blocks * per_block]

    return (
        field(0, RECORD_SCALES, np.int16, 32),
        field(RECORD_SCALES, RECORD_SUMS, np.float32, 1),
        field(RECORD_SUMS, 576, np.int32, 1),
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_quantisation_has_the_golden_bits(kernels, name):
    g = golden(name)
    pack, _ = kernels.quantise(g["x"])
    q, scale, total = unpacked(pack, g["x"].shape[1])
    assert (q == g["q"].reshape(q.shape)).all()
    assert scale.tobytes() == g["scale"].tobytes()
    assert (total == g["sum"]).all()
    assert kernels.status[0] == NOTHING_LATCHED


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("shift", [0, 1, 2, 13])
def test_rows_have_the_golden_bits(kernels, tools, name, shift):
    g = golden(name)
    data = tools.shifted(g["weight"], shift)
    _, xs = keep = kernels.quantise(g["x"])
    for tokens in (1, 2, 3):
        out = kernels.linear(name, data, 11, g["x"].shape[1] // 32, tokens, xs)
        assert same_bits(out, g["out"][:tokens]), tokens
    del keep


@pytest.mark.parametrize("name", QUANTISED)
def test_windows_give_each_token_the_bits_it_gets_alone(kernels, name):
    g = golden(name)
    width = g["x"].shape[1]
    x = np.random.default_rng(3).standard_normal((35, width)).astype(np.float32)
    pack, xs = kernels.quantise(x)
    alone = np.concatenate(
        [kernels.linear(name, g["weight"], 11, width // 32, 1, xs[t : t + 1]) for t in range(35)]
    )
    for tokens in (2, 3, 4, 5, 6, 7, 8, 33, 35):
        out = kernels.linear(name, g["weight"], 11, width // 32, tokens, xs)
        assert same_bits(out, alone[:tokens]), tokens
    del pack


@pytest.mark.parametrize("name", QUANTISED)
def test_tiles_have_the_golden_bits(kernels, tools, name):
    g = golden(name)
    width = g["x"].shape[1]
    for shift in (0, 1, 14):
        data = tools.shifted(g["weight"], shift)
        _, xs = keep = kernels.quantise(g["x"], "tiles")
        for tokens in (1, 2, 3):
            out = kernels.linear(name, data, 11, width // 32, tokens, xs, tiles=True)
            assert same_bits(out, g["out"][:tokens]), (shift, tokens)
        del keep


@pytest.mark.parametrize("name", QUANTISED)
def test_tiles_have_the_bits_of_windows(kernels, name):
    g = golden(name)
    width = g["x"].shape[1]
    x = np.random.default_rng(3).standard_normal((70, width)).astype(np.float32)
    x[3] *= np.float32(1e20)
    (_, rows), (_, tiles) = keep = kernels.quantise(x), kernels.quantise(x, "tiles")
    expected = kernels.linear(name, g["weight"], 11, width // 32, 70, rows)
    got = kernels.linear(name, g["weight"], 11, width // 32, 70, tiles, tiles=True)
    assert same_bits(got, expected)
    del keep


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shift", [0, 2, 12])
def test_float_rows_have_the_golden_bits(kernels, tools, name, shift):
    g = golden(name)
    x = np.ascontiguousarray(g["x"])
    data = tools.shifted(g["weight"], shift)
    for tokens in (1, 3):
        out = kernels.linear(name, data, 11, x.shape[1], tokens, tools.addresses(x))
        assert same_bits(out, g["out"][:tokens])


@pytest.mark.parametrize("name", QUANTISED + FLOATS)
def test_embedding_rows_have_the_golden_bits(kernels, name):
    g = golden(name)
    out = np.empty_like(g["embed"])
    args = [g["ids"], g["weight"], out, out.shape[1], g["weight"].nbytes // 11]
    kernels.call("embed", (name,), args, len(g["ids"]))
    assert same_bits(out, g["embed"])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 3), rows=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_random_rows_equal_the_exact_mode(kernels, name, seed, groups, rows):
    rng = np.random.default_rng(seed)
    kind = TYPES[name]
    columns = groups * 256 if kind.block == 256 else groups * 96
    raw = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    halves = {"Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[name]
    for offset in halves:
        scale = rng.standard_normal(raw.shape[:2]).astype("<f2")
        raw[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    x = (rng.standard_normal((2, columns)) * np.exp2(rng.integers(-20, 20))).astype(np.float32)
    matrix = exact.Matrix(name, rows, columns, raw.reshape(-1))
    pack, xs = kernels.quantise(x)
    out = kernels.linear(name, matrix.data, rows, columns // 32, 2, xs)
    assert same_bits(out, exact.linear(x, matrix))
    del pack


def test_one_plane_has_the_golden_bits(tools, cache):
    kernels = tools.kernels(None, cache, exact_quant.ONE_PLANE)
    for name in ("Q8_0", "Q4_K", "Q5_1"):
        g = golden(name)
        pack, xs = kernels.quantise(g["x"])
        out = kernels.linear(name, g["weight"], 11, g["x"].shape[1] // 32, 3, xs)
        assert same_bits(out, g["one_plane"]), name
        del pack


def test_a_bias_is_added_last(kernels):
    g = golden("Q8_0")
    bias = np.arange(11, dtype=np.float32) / 3
    pack, xs = kernels.quantise(g["x"])
    out = kernels.linear("Q8_0", g["weight"], 11, g["x"].shape[1] // 32, 3, xs, bias)
    assert same_bits(out, g["out"] + bias)
    del pack


def test_rows_beyond_the_last_are_not_touched(kernels, tools):
    g = golden("Q4_K")
    pack, xs = kernels.quantise(g["x"])
    for tokens in (1, 3):
        out = np.full((tokens, 16), 5, np.float32)
        window = out[:, 2:13]
        kernels.linear("Q4_K", g["weight"], 11, 24, tokens, xs, out=window)
        assert same_bits(window, g["out"][:tokens])
        assert (out[:, :2] == 5).all()
        assert (out[:, 13:] == 5).all()
    del pack, tools


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 33, 255])
def test_values_that_are_not_finite_are_latched(kernels, bad, where):
    x = np.ones((2, 256), np.float32)
    x[1, where] = bad
    kernels.status[0] = NOTHING_LATCHED
    kernels.quantise(x)
    assert kernels.status[0] == 7
    kernels.status[0] = 3
    kernels.quantise(x)
    assert kernels.status[0] == 3
    kernels.status[0] = NOTHING_LATCHED
