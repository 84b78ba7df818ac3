"""Compiles the device kernels for NVIDIA's architectures, with no device, and shows what they need.

    python tests/device_sources/cuda_table.py sm_75 sm_90 [--only NAME] [--sample]

NVRTC of its wheel makes PTX, `ptxas` (of its wheel, or beside nvcc) machine code. A line for each
kernel and architecture: registers, bytes of stack and of spills, static shared memory. Leaves with
1 where one does not compile or spills, with 77 and the reason where there is nothing to compile
with.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from compilers import NotCompiled, Nvrtc, every_key  # noqa: E402

from strata_core.kernels.device.sources import source_of  # noqa: E402
from strata_core.runtime import KernelKey  # noqa: E402

SKIPPED = 77
NUMBERS = (
    r"(\d+) bytes stack frame, (\d+) bytes spill stores",
    r"Used (\d+) registers",
    r"(\d+) bytes smem",
)


def assembler() -> str | None:
    """Where ptxas is."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).rglob("bin/ptxas"):
            return str(path)
    return shutil.which("ptxas")


def needs(ptxas: str, nvrtc: Nvrtc, key: KernelKey, architecture: str) -> tuple[int, ...]:
    """Registers, bytes of stack, of spills and of static shared memory. Raises NotCompiled."""
    source = source_of(key)
    virtual = architecture.replace("sm_", "compute_")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_bytes(nvrtc.compile(source.text, source.name, virtual, "PTX").rstrip(b"\0"))
        command = [ptxas, "-v", f"-arch={architecture}", str(text), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotCompiled(done.stderr)
    found = [re.search(pattern, done.stderr) for pattern in NUMBERS]
    stack, spills = (int(v) for v in found[0].groups()) if found[0] else (0, 0)
    registers, shared = (int(m.group(1)) if m else 0 for m in found[1:])
    return registers, stack, spills, shared


def main() -> int:
    """Parse, compile, print."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("architectures", nargs="+")
    options.add_argument("--only", default="", help="kernels whose name begins so")
    options.add_argument("--sample", action="store_true", help="each kernel once")
    asked = options.parse_args()
    ptxas = assembler()
    try:
        nvrtc = Nvrtc()
    except LookupError as error:
        print(f"nothing is compiled: {error}")
        return SKIPPED
    if ptxas is None:
        print("nothing is compiled: there is no ptxas")
        return SKIPPED
    keys = [key for key in every_key() if key.name.startswith(asked.only)]
    if asked.sample:
        keys = list({key.name: key for key in keys}.values())
    work = [(key, arch) for arch in asked.architectures for key in keys]
    print(f"{'kernel':36} {'arch':7} {'registers':>9} {'stack':>6} {'spills':>6} {'shared':>6}")

    def one(what: tuple[KernelKey, str]) -> tuple[bool, str]:
        key, arch = what
        name = " ".join(map(str, (key.name, *key.parameters)))
        try:
            registers, stack, spills, shared = needs(ptxas, nvrtc, key, arch)
        except NotCompiled as error:
            return False, f"{name} {arch}: {str(error)[:1200]}"
        return not spills, f"{name:36} {arch:7} {registers:9} {stack:6} {spills:6} {shared:6}"

    bad = 0
    with ThreadPoolExecutor(2) as pool:
        for good, text in pool.map(one, work):
            print(text, flush=True)
            bad += not good
    print(f"{len(work)} compiled, {bad} fail or spill")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
