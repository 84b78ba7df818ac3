"""Products of prompts on matrix units, their sources run on the host: a token's bits are its own.

Equal bits with the simulator are test_on_the_host.py's; here a token is computed alone, in
other chunks and in tiles of other widths, which must not change it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from host_build import HostBuild, host_compiler
from kernel_bench import Bench, Buffer, Case, Ref, difference, same
from kernel_inputs import activations, records_of, stored_rows
from prompt_cases import down_case, gate_up_case, on_matrix_units

from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.target import host_target
from strata_core.kernels.device import prompt_table
from strata_core.kernels.device.prompt_table import MATRIX_TILE
from strata_core.kernels.device.table import make_launch
from strata_core.kernels.exact_quant import Activations
from strata_core.kernels.exact_units import rows_product
from strata_core.runtime import PLAIN_ROOM, KernelKey
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers
from strata_core.testing.sim.host_kernels import HostKernels

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="there is no C++ compiler")

TYPES = ("Q4_K", "Q6_K", "Q8_0")
TOKENS = MATRIX_TILE + 21


def whole(type_name: str) -> Case:
    """A product of more tokens and rows than a tile has, with a bias."""
    rng = np.random.default_rng(8)
    rows, columns = 140, 512
    data = stored_rows(type_name, rows, columns, rng)
    buffers = {
        "weight": Buffer(data),
        "x": Buffer(records_of(activations(TOKENS, columns, rng))),
        "out": Buffer(np.zeros((TOKENS, rows), np.float32)),
        "bias": Buffer(rng.standard_normal(rows).astype(np.float32)),
    }
    sizes = {"stride": data.shape[1], "tokens": TOKENS, "rows": rows, "columns": columns}
    key = KernelKey("matrix_linear", (type_name,))
    args = {**{name: Ref(name) for name in buffers}, **sizes}
    return Case(f"{TOKENS} tokens", key, buffers, args, {"out": same})


def piece(case: Case, first: int, end: int) -> Case:
    """Tokens `first` to `end` - 1 of a case."""
    buffers = dict(case.buffers)
    for name in ("x", "out"):
        buffers[name] = Buffer(case.buffers[name].data[first:end].copy())
    return evolve(case, buffers=buffers, args={**case.args, "tokens": end - first})


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    keys = [whole(name).key for name in TYPES] + [case.key for case in several_tiles()]
    build = HostBuild(keys, tmp_path_factory.mktemp("compiled"))
    runtime = build.runtime(SimHardware(matrix=True))
    yield Bench(runtime, planes=True)
    runtime.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TYPES)
def test_a_token_has_one_set_of_bits(bench, name, monkeypatch):
    case = whole(name)
    narrow = bench.run(case)["out"]
    monkeypatch.setattr(prompt_table, "MATRIX_BLOCKS", 1)
    assert bench.run(case)["out"].tobytes() == narrow.tobytes()
    for first, end in ((0, 1), (TOKENS - 1, TOKENS), (5, 8), (9, TOKENS - 3)):
        out = bench.run(piece(case, first, end))["out"]
        assert out.tobytes() == narrow[first:end].tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_they_are_the_restated_orders(bench, name):
    case = whole(name)
    records, data = case.buffers["x"].data, case.buffers["weight"].data
    x = Activations(
        records["q"].reshape(TOKENS, -1, 32).astype(np.int32),
        records["d"].reshape(TOKENS, -1),
        records["sum"].reshape(TOKENS, -1),
        finite=True,
    )
    expected = rows_product(name, data, len(data), case.args["columns"], x)
    expected += case.buffers["bias"].data
    assert difference({"out": expected}, bench.run(case)) == ""


def several_tiles():
    """Three tiles of an expert for two blocks, the last one of other lengths for a warp's sides."""
    rng = np.random.default_rng(9)
    picks = np.zeros((2 * MATRIX_TILE + 17, 1), np.int32)
    cases = [
        down_case("Q8_0", picks, (3, 0), (40, 352, 2), rng),
        gate_up_case(("Q4_0", "Q4_0", "Q8_0"), picks, (0, 3), (96, 96, 2), rng),
    ]
    return list(on_matrix_units(cases))


@pytest.mark.timeout(300)
def test_tiles_of_half_the_tokens_give_the_same_bits(bench, tmp_path):
    """As devices of compute capability 7.5 have, whose blocks get less shared memory."""
    cases = [whole("Q4_K"), *several_tiles()]
    build = HostBuild([case.key for case in cases], tmp_path, "__CUDA_ARCH__ 750")
    runtime = build.runtime(SimHardware(matrix=True))
    halves = Bench(runtime, planes=True)
    for case in cases:
        assert difference(bench.run(case), halves.run(case)) == "", case.label
    runtime.close()


@pytest.mark.timeout(300)
def test_a_block_computes_one_tile_after_the_other(bench, compiled_kernels):
    kernels = HostKernels(Library(Compiler(host_target(), compiled_kernels, print)))
    hardware = SimHardware(matrix=True)
    runtime = SimRuntime(hardware, host_kernels=kernels.mapping(), pointers=pointers)
    expected = Bench(runtime, planes=False)
    for case in several_tiles():
        assert difference(expected.run(case), bench.run(case)) == "", case.label
    runtime.close()


def test_tiles_ask_for_less_where_a_block_has_less():
    values = {"tokens": 300, "rows": 4096, "columns": 64, "stride": 68}
    at = dict.fromkeys(("weight", "x", "out", "bias"), 0)
    launch = make_launch("matrix_linear", ("Q8_0",), **values, **at)
    assert launch.grid == (32, 8, 1)
    assert PLAIN_ROOM < prompt_table.within(launch, 64 << 10).shared == 64 << 10
    assert prompt_table.within(launch, 99 << 10) == launch
    assert launch.shared <= 99 << 10
    less = {**values, **at, "rows": 512, "tokens": 2048}
    few = make_launch("matrix_linear", ("Q8_0",), **less)
    assert few.grid == (4, 64, 1)
