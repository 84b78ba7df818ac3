"""The device kernels themselves, run on the host, against the CPU's compiled steps: equal bits.

Here is a selection that covers every kernel and every type of weights and of keys; all cases run
with `python tests/device/check_kernels.py --on host`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import host_build
from attention_cases import append_cases, attention_cases, merge_cases
from buffer_cases import buffer_cases
from fused_cases import fused_cases
from host_build import HostBuild, host_compiler
from kernel_bench import RECORD, Bench, Buffer, difference, pack_planes, unpack_planes
from kernel_inputs import QUANTISED, activations, records_of
from late import LATE, OVERWRITES, is_late, run_late
from prompt_cases import (
    grouping_cases,
    on_matrix_units,
    prompt_attention_cases,
    prompt_down_cases,
    prompt_expert_cases,
    prompt_extreme_cases,
    prompt_linear_cases,
    prompt_ragged_cases,
)
from weight_cases import down_cases, embed_cases, expert_cases, linear_cases

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.target import host_target
from strata_core.kernels.device import table
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers
from strata_core.testing.sim.host_kernels import HostKernels

EXPERTS = (
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q8_0", "F16"),
    ("MXFP4",) * 3,
    ("BF16", "F32", "Q4_0"),
)
DOWN = ("Q6_K", "Q5_1", "Q4_0", "F16")


def selected():
    yield from buffer_cases()
    for name in TYPES:
        yield from list(embed_cases(name))[-1:]
        yield from list(linear_cases(name))[2:8]
    for name in DOWN:
        yield from down_cases(name)
    for types in EXPERTS:
        yield from expert_cases(*types)
    for kv, head_dim in (("fp32", 16), ("fp16", 64), ("int8", 32)):
        yield from append_cases(kv)
        yield from list(attention_cases(kv, head_dim))[1:3]
        yield from list(attention_cases(kv, head_dim))[5:]
    yield from list(attention_cases("fp32", 80))[4:6]  # keys that are too wide to be held
    yield from merge_cases(80)
    yield from fused_cases(every=False)
    yield from grouping_cases()
    products = list(products_of_prompts())
    yield from products
    yield from on_matrix_units(products)
    for kv, head_dim in (("fp32", 16), ("int8", 32), ("fp16", 264)):
        yield from list(prompt_attention_cases(kv, head_dim))[1:3]
    for kv, head_dim in (("fp16", 128), ("int8", 64), ("fp32", 80)):
        yield from list(prompt_attention_cases(kv, head_dim))[4:]


def products_of_prompts():
    for name in ("Q4_K", "Q6_K", "MXFP4", "F16"):
        yield from list(prompt_linear_cases(name))[-1:]
        yield from list(prompt_down_cases(name))[1:2]
        yield from list(prompt_expert_cases(name, name, name))[1:]
    yield from list(prompt_linear_cases("F32"))[3:]
    for name in ("Q4_0", "Q5_1", "Q8_0"):
        yield from list(prompt_down_cases(name))[:1]
    for name in QUANTISED:
        yield from prompt_extreme_cases(name)
    yield from prompt_ragged_cases("Q5_K")


CASES = list(selected())

OTHERS = frozenset({"matrix_attention"})
"""The kernel whose bits are its own: test_matrix_attention.py runs it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def expected(compiled_kernels):
    library = Library(Compiler(host_target(), compiled_kernels, print))
    kernels = HostKernels(library).mapping()
    runtime = SimRuntime(SimHardware(), host_kernels=kernels, pointers=pointers)
    yield Bench(runtime, planes=False)
    runtime.close()


@pytest.fixture(scope="module")
def built(folder):
    if host_compiler() is None:
        pytest.skip("there is no C++ compiler to make the device sources for the host with")
    return HostBuild([case.key for case in CASES], folder)


@pytest.fixture(scope="module")
def emulated(built):
    runtime = built.runtime()
    yield Bench(runtime, planes=True)
    runtime.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.label} {case.key.parameters}")
def test_bits_are_the_cpus(expected, emulated, case):
    assert difference(expected.run(case), emulated.run(case)) == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in LATE if name not in OTHERS])
def test_nothing_of_the_launch_before_is_read_before_the_wait(expected, emulated, built, name):
    cases = [case for case in CASES if case.key.name == name and is_late(case)]
    assert cases
    for case in cases[-4:]:
        assert difference(expected.run(case), run_late(emulated, built, case)) == "", case.label


def test_every_kernel_is_among_them():
    assert {case.key.name for case in CASES} == set(DEVICE_KERNELS) - OTHERS
    assert set(LATE) == set(DEVICE_KERNELS) - OVERWRITES


def test_a_block_of_attention_may_have_several_heads(expected, emulated, monkeypatch):
    """As blocks of long windows have."""
    monkeypatch.setattr(table, "ENOUGH_BLOCKS", 1)
    cases = [case for case in CASES if case.key.name == "attention"]
    assert max(case.args["group"] for case in cases) > 2
    for case in cases:
        assert difference(expected.run(case), emulated.run(case)) == "", case.label


COPYING = ("embed", "linear", "dispatch", "attention", "prompt_floats", "matrix_linear")
"""A kernel of each way of copying to shared memory that is known here."""


@pytest.fixture(scope="module")
def hasty(folder):
    """The kernels of COPYING, whose waits for copies are none, and their cases."""
    if host_compiler() is None:
        pytest.skip("there is no C++ compiler to make the device sources for the host with")
    keys = {case.key.name: case.key for case in CASES}
    cases = {name: [case for case in CASES if case.key == keys[name]] for name in COPYING}
    with pytest.MonkeyPatch.context() as patch:
        none = "template <int> static void forget() { ::under_way[::current].clear(); }\n"
        late = host_build.LATE_COPIES.replace("wait_for_groups", "forget")
        patch.setattr(host_build, "LATE_COPIES", none + late)
        build = HostBuild([keys[name] for name in COPYING], folder)
    runtime = build.runtime(SimHardware(matrix=True))
    yield Bench(runtime, planes=True), cases
    runtime.close()


@pytest.mark.parametrize("name", COPYING)
def test_what_is_read_before_it_has_arrived_is_found(expected, hasty, name):
    bench, cases = hasty
    assert any(difference(expected.run(case), bench.run(case)) for case in cases[name])


def test_planes_hold_what_records_hold():
    records = records_of(activations(3, 800, np.random.default_rng(3)))
    assert records.dtype == RECORD
    back = unpack_planes(pack_planes(records))
    assert difference({"x": records}, {"x": back}) == ""
    back["q"][2, 1, 7] += 1
    assert "x.q(2, 1, 7)" in difference({"x": records}, {"x": back})


def test_a_stray_write_is_found(expected):
    case = next(case for case in CASES if case.label == "add 1x200")
    short = {**case.buffers, "x": Buffer(case.buffers["x"].data[:, :150].copy())}
    with pytest.raises(AssertionError, match="written behind x"):
        expected.run(type(case)(case.label, case.key, short, case.args, case.looks))
