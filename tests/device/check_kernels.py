"""Every kernel of the device table, on a device or the host, against the CPU's steps, bit by bit.

Compiles all kernels, runs each on random and edge inputs in windows of 1 to 8 tokens, and prints
one line for each kernel and set of types: how many cases were equal, or the first difference.
Products on matrix units have an order of their own, which the simulator restates in numpy.
Attention on them has none that could be restated: it is compared with float64, and its bits with
those of the same tokens in other chunks. Leaves with 1 if anything differs.

Run: python tests/device/check_kernels.py [--on host] [--only NAME] [--device N] [--cache FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "tests/device_sources")]

from attention_cases import all_attention_cases  # noqa: E402
from buffer_cases import buffer_cases  # noqa: E402
from fused_cases import fused_cases  # noqa: E402
from kernel_bench import Bench, Case, difference  # noqa: E402
from matrix_attention_cases import NAME as OWN_ORDER  # noqa: E402
from matrix_attention_cases import all_matrix_attention_cases, problem  # noqa: E402
from prompt_cases import prompt_cases  # noqa: E402
from weight_cases import weight_cases  # noqa: E402

from strata_core.errors import StrataError  # noqa: E402
from strata_core.kernels.code_cache import CodeCache  # noqa: E402
from strata_core.kernels.cpu.jit import Compiler as CpuCompiler  # noqa: E402
from strata_core.kernels.cpu.library import Library  # noqa: E402
from strata_core.kernels.cpu.target import host_target  # noqa: E402
from strata_core.kernels.device.prompt_table import MATRIX_NAMES  # noqa: E402
from strata_core.testing.sim import SimHardware, SimRuntime  # noqa: E402
from strata_core.testing.sim.args import pointers  # noqa: E402
from strata_core.testing.sim.host_kernels import HostKernels  # noqa: E402


def oracle(folder: Path) -> Bench:
    """The simulated accelerator, whose kernels are the CPU's compiled steps."""
    library = Library(CpuCompiler(host_target(), folder, print))
    kernels = HostKernels(library).mapping()
    hardware = SimHardware(matrix=True)
    return Bench(SimRuntime(hardware, host_kernels=kernels, pointers=pointers), planes=False)


def device(folder: Path, number: int) -> Bench:
    """The CUDA device of that number."""
    from strata_cuda.binding import load_binding
    from strata_cuda.compiler import Compiler
    from strata_cuda.runtime import CudaRuntime

    binding = load_binding("windows" if sys.platform == "win32" else "linux")
    runtime = CudaRuntime(binding, Compiler(binding, CodeCache(folder, print)))
    found = runtime.devices()[number]
    print(f"{found.label}: {found.name}, {found.architecture}, {found.units} units", flush=True)
    return Bench(runtime, planes=True, device=number)


def host(folder: Path, cases) -> Bench:
    """The device sources compiled for the host."""
    from host_build import HostBuild

    build = HostBuild([case.key for case in cases], folder)
    return Bench(build.runtime(SimHardware(matrix=True)), planes=True)


def possible(cases, tested: Bench):
    """The cases whose kernels a device has."""
    if tested.runtime.devices()[tested.device].matrix:
        return list(cases)
    return [case for case in cases if case.key.name not in MATRIX_NAMES]


def _problem(case: Case, expected: Bench, tested: Bench) -> str:
    if case.key.name == OWN_ORDER:
        return problem(case, lambda one: tested.run(one)["out"], np.random.default_rng(5))
    return difference(expected.run(case), tested.run(case))


def check(cases, expected: Bench, tested: Bench) -> int:
    """Run all; the number of kernels that differ somewhere."""
    counts: Counter = Counter()
    problems: dict = {}
    for case in cases:
        try:
            found = _problem(case, expected, tested)
        except (AssertionError, StrataError) as error:
            found = f"{type(error).__name__}: {error}"
        counts[case.key] += 1
        if found:
            problems.setdefault(case.key, []).append(f"{case.label}: {found}")
    for key in sorted(counts):
        name = " ".join(map(str, (key.name, *key.parameters)))
        wrong = problems.get(key, [])
        print(f"{name:28} {counts[key] - len(wrong)}/{counts[key]} good", *wrong[:2], sep="\n    ")
    print(f"{sum(counts.values())} cases of {len(counts)} kernels, {len(problems)} kernels differ")
    return len(problems)


def main() -> int:
    """Parse, compile at once, run."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--only", default="", help="kernels whose name begins so")
    options.add_argument("--device", type=int, default=0)
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    options.add_argument("--on", choices=("device", "host"), default="device")
    asked = options.parse_args()
    cases = [*buffer_cases(), *weight_cases(), *all_attention_cases()]
    cases += [*fused_cases(), *prompt_cases(), *all_matrix_attention_cases()]
    cases = [case for case in cases if case.key.name.startswith(asked.only)]
    on_host = asked.on == "host"
    start = time.perf_counter()
    tested = host(asked.cache, cases) if on_host else device(asked.cache, asked.device)
    cases = possible(cases, tested)
    tested.runtime.load(tested.device, [case.key for case in cases])
    print(f"compiled and loaded in {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    try:
        wrong = check(cases, oracle(asked.cache), tested)
    finally:
        tested.runtime.close()
    print(f"ran in {time.perf_counter() - start:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
