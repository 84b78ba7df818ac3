"""The golden rows of every weight type on a device: what the self-test of a start looks at.

    python tests/device/check_golden.py [--on host|sim|cuda|hip] [--types Q4_K,F16] [--cache FOLDER]

A line for each type: kernels, launches, milliseconds, and which kernels gave other bits, from the
device's memory and over the link. Leaves with 1 where one did, or where it took too long: 50 ms on
a device, not counting compiling.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("plugins/cuda", "plugins/hip", "tests/device_sources")
sys.path[:0] = [str(ROOT), *(str(ROOT / place) for place in PLACES)]

from strata_core.cache.staging import Staging  # noqa: E402
from strata_core.checkpoint.types import TYPES  # noqa: E402
from strata_core.kernels.code_cache import CodeCache  # noqa: E402
from strata_core.kernels.cpu.jit import Compiler as CpuCompiler  # noqa: E402
from strata_core.kernels.cpu.library import Library  # noqa: E402
from strata_core.kernels.cpu.target import host_target  # noqa: E402
from strata_core.kernels.cpu.unpack import UNPACK  # noqa: E402
from strata_core.kernels.device.golden import TESTED, GoldenWork  # noqa: E402
from strata_core.kernels.device.layout import HIT, LINK  # noqa: E402
from strata_core.kernels.device.prompt_table import MATRIX_NAMES, OF_FLOATS  # noqa: E402
from strata_core.kernels.device.self_test import compute, golden_keys  # noqa: E402
from strata_core.kernels.device.table import DEVICE_KERNELS  # noqa: E402
from strata_core.kernels.self_test import LaneCheck, check_lane  # noqa: E402
from strata_core.memory.held import Held  # noqa: E402
from strata_core.memory.ledger import Ledger  # noqa: E402
from strata_core.runtime import PLAIN_ROOM, KernelKey, Runtime  # noqa: E402
from strata_core.testing.sim import SimHardware, SimRuntime  # noqa: E402
from strata_core.testing.sim.args import pointers  # noqa: E402
from strata_core.testing.sim.host_kernels import HostKernels  # noqa: E402

MOST_MS = 50.0


def keys_of(type_name: str) -> list[KernelKey]:
    """Every kernel that can be tested, for one type."""
    found = [KernelKey("combine"), KernelKey("combine_norm")]
    others = OF_FLOATS.values() if type_name in UNPACK else {"products", *OF_FLOATS, *MATRIX_NAMES}
    for name in sorted(TESTED - {"quantise", "combine", "combine_norm"}):
        if name not in others:
            count = len(DEVICE_KERNELS[name].parameters)
            found.append(KernelKey(name, (type_name,) * count))
    return golden_keys(found)


def runtime_on(name: str, folder: Path, keys: list[KernelKey]) -> Runtime:
    """The runtime of that name; `host` is the device sources compiled for the host."""
    if name == "host":
        from host_build import HostBuild

        return HostBuild(keys, folder).runtime(SimHardware(matrix=True))
    if name == "sim":
        library = Library(CpuCompiler(host_target(), folder, print))
        kernels = HostKernels(library).mapping()
        return SimRuntime(SimHardware(matrix=True), host_kernels=kernels, pointers=pointers)
    if name == "cuda":
        from strata_cuda.binding import load_binding
        from strata_cuda.compiler import Compiler
        from strata_cuda.runtime import CudaRuntime

        binding = load_binding("windows" if sys.platform == "win32" else "linux")
        return CudaRuntime(binding, Compiler(binding, CodeCache(folder, print)))
    from check_hip import make_runtime

    made: Runtime = make_runtime(folder)
    return made


@frozen
class Found:
    """What a device made of the golden rows of some kernels."""

    own: LaneCheck
    link: LaneCheck
    launches: int
    ms: float

    @property
    def wrong(self) -> tuple[str, ...]:
        """Kernels with other bits, and where."""
        return tuple(check.why for check in (self.own, self.link) if not check.exact)


def check(runtime: Runtime, keys: list[KernelKey]) -> Found:
    """Compute the golden rows of some kernels on the first device, once to warm up and once."""
    runtime.load(0, keys)
    held = Held(runtime, Ledger(devices=1))
    staging = Staging.make(held, 0)
    try:
        for _ in range(2):
            began = time.perf_counter()
            image, came = compute(held, 0, keys, staging, link=True)
            ms = (time.perf_counter() - began) * 1e3
    finally:
        staging.close()
        held.close()
    count = GoldenWork(256, 256, PLAIN_ROOM)
    count.add(keys)
    own, link = (
        check_lane(name, image.computed(came, lane))
        for name, lane in (("own", HIT), ("link", LINK))
    )
    return Found(own, link, len(count.launches), ms)


def main() -> int:
    """Every type that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--on", choices=("host", "sim", "cuda", "hip"), default="cuda")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    asked = parser.parse_args()
    types = asked.types.split(",")
    runtime = runtime_on(asked.on, asked.cache, [key for t in types for key in keys_of(t)])
    runtime.open_context(0)
    units = runtime.devices()[0].matrix
    failed = 0
    try:
        for type_name in types:
            keys = [k for k in keys_of(type_name) if units or k.name not in MATRIX_NAMES]
            found = check(runtime, keys)
            late = asked.on in ("cuda", "hip") and found.ms > MOST_MS
            failed += bool(found.wrong) or late
            say = " | ".join(found.wrong) or "equal"
            print(f"{type_name:8} {len(keys)} kernels, {found.launches} launches, "
                  f"{found.ms:.1f} ms: {say}", flush=True)  # fmt: skip
    finally:
        runtime.close()
    print(f"{len(types)} types, {failed} of them wrong or late")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
