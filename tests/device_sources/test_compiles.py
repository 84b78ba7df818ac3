"""The device kernels compile for AMD and NVIDIA: a sample here, all of them in `.ci/run`.

How many compiled is told at the end of the tests' output; a compiler that is not there is a skip
with its reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from code_object import usages
from compile_table import SKIPPED, Row, compact
from compilers import Missing, Needs, Toolchain, every_key, kept, needs_of, nvrtc

from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.prompt_table import MATRIX_NAMES
from strata_core.kernels.device.sources import source_of
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.runtime import KernelKey

SCRIPT = Path(__file__).with_name("compile_table.py")

RUNS = {
    "hiprtc": ("gfx906", "gfx90a", "gfx1030"),
    "clang": ("gfx1100", "gfx942", "gfx1200"),
    "nvrtc": ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiler", RUNS)
def test_a_sample_of_the_kernels_compiles(compiler, record_property):
    command = [sys.executable, str(SCRIPT), compiler, *RUNS[compiler], "--sample"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == SKIPPED:
        record_property("compiled", f"{compiler}: {done.stdout.strip()}")
        pytest.skip(done.stdout.strip())
    counted = [line for line in done.stdout.splitlines() if " compiled, " in line]
    print(done.stdout)
    record_property("compiled", counted[0] if counted else f"{compiler}: none")
    assert done.returncode == 0, done.stdout + done.stderr
    total = len(DEVICE_KERNELS) - (0 if compiler == "nvrtc" else len(MATRIX_NAMES))
    assert counted == [f"{compiler}: {total} of {total} compiled, 0 spill"]


LARGEST_BLOCK = re.compile(r"^(?:KERNEL\(1024\)|ROOMY\(1024, 1\))\n(\w+)\(", re.MULTILINE)


def kernels_of_the_largest_block():
    """Every one with its first variant; the types in a cache change no more than a store."""
    keys = {key.name: key for key in reversed(every_key(matrix=True))}
    return [
        key
        for key in keys.values()
        if source_of(key).entry in LARGEST_BLOCK.findall(source_of(key).text)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_kernel_of_1024_threads_spills_where_two_blocks_fit(arch):
    """There the assembler may choose 32 registers for two blocks side by side, and spill."""
    try:
        tools = nvrtc()
    except (Missing, ImportError) as error:
        pytest.skip(str(error))
    needs = {key.name: tools.compile(key, arch) for key in kernels_of_the_largest_block()}
    assert {"dispatch", "assign", "combine_norm"} <= needs.keys()
    assert {name: n.spills for name, n in needs.items() if n.spills} == {}


# --- what the compilers say --------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [b"", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(80)]
)
def test_what_is_no_code_object(code):
    with pytest.raises(ValueError, match=r"no 64-bit ELF file|no metadata note"):
        usages(code)


SAID = """ptxas info    : Compiling entry function 'attention' for 'sm_75'
ptxas info    : Function properties for attention
ptxas         .     24 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 69 registers, used 1 barriers, 1024 bytes smem, 416 bytes cmem[0]
"""


def test_what_the_assembler_says_of_a_kernel():
    assert needs_of(SAID) == Needs(69, 28, 1024, 24, "1 barriers")
    assert needs_of(SAID.replace(", 1024 bytes smem", "")).shared == 0
    for gone in ("Used", "stack frame"):
        with pytest.raises(ValueError, match="does not say"):
            needs_of(SAID.replace(gone, "?"))


def test_what_was_compiled_before_is_known_by_all_that_decides_it(tmp_path):
    done = []

    def tools(name="A 1", options=("-O3",)):
        return Toolchain(
            name, options, lambda key, arch: done.append(arch) or Needs(9, 0, 0, 4, "")
        )

    add, cache = KernelKey("add"), CodeCache(tmp_path, print)
    for given, arch, known in (
        (tools(), "x", 0), (tools(), "x", 1), (tools(), "y", 0), (tools(name="A 2"), "x", 0),
        (tools(options=("-O2",)), "x", 0), (tools(options=("-O2",)), "x", 1),
    ):  # fmt: skip
        compile_, found = kept(given, cache)
        assert compile_(add, arch) == Needs(9, 0, 0, 4, "")
        assert len(found) == known
    assert done == ["x", "y", "x", "x"]
    compile_, _ = kept(tools(), cache)
    compile_(KernelKey("signal"), "x")
    assert len(done) == 5


def test_the_compact_table_hides_nothing():
    def row(type_name, arch, registers=0, spills=0):
        needs = Needs(registers, spills, 0, 0, "") if registers else None
        return Row(KernelKey("linear", (type_name,)), arch, needs, "no such arm")

    found = [row("Q4_0", "a", 40), row("F32", "a", 64, 8), row("Q4_0", "b"), row("F32", "b", 30)]
    found += [row("Q4_0", "c"), row("F32", "c")]
    *_, line = compact(found, ("a", "b", "c", "d"))
    assert line == "| linear | 2 | 64, spills 8 | 30, 1 fail | fails | - |"
    assert str(found[2]).endswith("does not compile: no such arm")
