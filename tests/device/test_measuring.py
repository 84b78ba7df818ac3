"""The measuring programs measure the right thing: their kernels against the oracle, bit by bit.

What needs a device is marked; the oracle, the CPU lane's stand-in, the compiled loops and the
kernels' compilation are tested everywhere (where gcc, nvcc or numba are there).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import lab
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

GGUF = {"Q4K": "Q4_K", "Q80": "Q8_0", "MX4": "MXFP4"}
finite = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2**40), max_value=2**40
)


@settings(max_examples=300, deadline=None)
@given(finite, finite, finite)
def test_oracle_fma_rounds_once(a, b, c):
    libm = ctypes.CDLL("libm.so.6")
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    assert float(oracle.fma(a, b, c)) == libm.fmaf(a, b, c)


@pytest.mark.parametrize("kind", GGUF)
def test_oracle_reads_the_formats(kind):
    gguf = pytest.importorskip("gguf")
    raw = oracle.random_rows(kind, 8, 768, np.random.default_rng(0))
    want = gguf.dequantize(raw, getattr(gguf.GGMLQuantizationType, GGUF[kind]))
    v, sc, mn, d, m = oracle.unpack(kind, raw)
    mine = (d * sc)[..., None] * v - (m * mn)[..., None]
    np.testing.assert_array_equal(mine.reshape(8, -1), want)


@pytest.mark.parametrize(("planes", "bound"), [(1, 2e-2), (2, 2e-4)])
@pytest.mark.parametrize("kind", GGUF)
def test_oracle_products_are_near_float64(kind, planes, bound):
    rng = np.random.default_rng(1)
    raw, x = oracle.random_rows(kind, 32, 2048, rng), rng.standard_normal(2048).astype(np.float32)
    v, sc, mn, d, m = oracle.unpack(kind, raw)
    w = (d * sc)[..., None].astype(np.float64) * v - (m * mn)[..., None]
    want = w.reshape(32, -1) @ x
    got = oracle.product(kind, raw, x, planes)
    assert np.abs(got - want).max() < bound * np.abs(want).max()


def test_products_of_prompts_are_timed_both_ways(compiled_kernels, capsys):
    pytest.importorskip("llvmlite")
    from check_kernels import oracle
    from time_products import Shape, time_products

    tested = oracle(compiled_kernels)
    time_products(tested, ("Q8_0",), (40,), Shape(64, 32, 3, 2, 32))
    assert list(tested.runtime.leaks()) == ["stream SIM0.1"]  # the bench's own
    tested.runtime.close()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "x"
    assert [row[:10].strip() for row in rows] == ["gate, up", "down", "dense"]
    assert all(len(row.split("Q8_0")[1].split()) == 6 for row in rows)


def test_cpu_lane_is_exact():
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    import bandwidth

    try:
        lane = bandwidth.build_lane()
    except subprocess.CalledProcessError:
        pytest.skip("this processor has no AVX2")
    assert bandwidth.lane_is_exact(lane)


def test_loops_launch_answer_and_time_out():
    pytest.importorskip("numba")
    import hostloop

    stub = ctypes.CDLL(None).pthread_equal  # (graph, stream) -> 0 while they differ
    stub.argtypes, stub.restype = [ctypes.c_size_t] * 2, ctypes.c_int
    steps, doorbell = hostloop.loops(stub)
    lines, answers = np.full(16 * 4, 3, np.uint32), np.zeros(16 * 4, np.uint32)
    done, out, cell = np.full(1, 3, np.uint32), np.zeros((1, 2), np.int64), np.zeros(2, np.int64)
    where = lines.ctypes.data, 30_000
    tail = done.ctypes.data, 3, 1, out, cell
    assert steps(np.arange(1, 6, dtype=np.uint64), np.uint64(0), *where, *tail) == 0
    assert out[0, 0] >= 4 * 30_000
    assert out[0, 1] < out[0, 0]
    head = np.uint64(1), np.uint64(0), *where, answers.ctypes.data, 4, False
    assert doorbell(*head, 2, *tail) == 0
    assert [int(a) for a in answers[::16]] == [3, 3, 0, 0]
    same = np.uint64(5), np.uint64(5), *where, answers.ctypes.data, 4, False
    assert doorbell(*same, 4, *tail) == -1000  # a refused launch
    lines[16] = 2
    assert doorbell(*head, 4, *tail) == -2  # a line that never comes: the wait is bounded


def test_times_of_prompts_are_of_what_tokens_see(compiled_kernels, capsys):
    import time_prompts

    assert time_prompts.operations(3, 5, heads=2, head_dim=8) == 2 * 2 * 2 * 8 * (6 + 7 + 8)
    rows = dict.fromkeys(time_prompts.rows(2048, 32768))
    assert {(2048, 0), (2048, 30720), (128, 0), (512, 16384 - 512)} < set(rows)
    small = ["--on", "sim", "--no-bits", "--kv", "int8", "--chunk", "16", "--longest", "64"]
    small += ["--heads", "2", "--kv-heads", "1", "--head-dim", "32"]
    small += ["--cache", str(compiled_kernels)]
    assert time_prompts.attention(time_prompts.options().parse_args(small)) == 0
    said = capsys.readouterr().out
    assert "int8  plain      16       48" in said
    assert "int8  matrix     16       48" in said
    assert "a prompt of 64 in chunks of 16" in said


@pytest.mark.parametrize(
    ("name", "arch"),
    [("rows", "sm_90"), ("matrix", "sm_90"), ("layer", "sm_90"), ("layer", "sm_75")],
)
def test_kernels_compile(name, arch, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    flags = [f"-arch={arch}", *lab.OPTIONS, "-cubin", "-o", str(tmp_path / "x.cubin")]
    flags += ["-Xcicc", "-O0", "-Xptxas", "-O0"]  # whether they compile, not how well
    path = tmp_path / f"{name}.cu"
    path.write_text(lab.source(f"{name}.cu"))
    got = subprocess.run(["nvcc", *flags, str(path)], capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr


@pytest.mark.device
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kind", GGUF)
def test_expert_rows_are_exact(device, kind, planes):
    import expert_rows

    rows, matrix = lab.Module("rows.cu"), lab.Module("matrix.cu")
    assert expert_rows.check(rows, matrix, kind, planes, seed=7) == []


@pytest.mark.device
@pytest.mark.parametrize("planes", [1, 2])
def test_dense_rows_are_exact(device, planes):
    import expert_rows

    assert expert_rows.check_dense(lab.Module("rows.cu"), planes, seed=8) == []


def test_every_launch_of_a_layer_is_timed(compiled_kernels, capsys, monkeypatch):
    import time_chunk

    monkeypatch.setattr(time_chunk, "ENOUGH_SECONDS", 0.001)
    small = ["--on", "sim", "--tokens", "8", "--cache", str(compiled_kernels)]
    assert time_chunk.layer(time_chunk.options().parse_args(small)) == 0
    said = capsys.readouterr().out
    for name in (
        "embed",
        "matrix_linear",
        "route",
        "prompt_group",
        "matrix_gate_up",
        "matrix_down",
    ):
        assert f"\n{name} " in said
    assert "a layer of 8 tokens" in said
