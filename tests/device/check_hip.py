"""The HIP plugin on a CUDA device: hip-python drives it over tests/device/hip_on_cuda.c.

    python tests/device/check_hip.py quick FOLDER [options of two_backends.py]
    python tests/device/check_hip.py verbs
    python tests/device/check_hip.py kernels [options of check_kernels.py]
    python tests/device/check_hip.py identity MODEL [MODEL ...] [options of identity.py]
    python tests/device/check_hip.py speed MODEL [options of `strata bench`]

Builds the library with gcc (ROCM_PATH is a folder of its own) and begins again with it, since the
loader reads LD_LIBRARY_PATH at the start of a process. The machine has no amdgpu driver: here, and
here alone, the probe passes over what it asks of the system and goes on to what the runtime says.
`quick` is the verbs, then identity and decode of both plugins side by side, within 100 seconds, or
with --seconds N of the second part; FOLDER holds the reference models (kjv-moe/, tiny/). The CUDA
plugin starts kernels early, which HIP cannot: decode is compared with and without that. `speed`
runs `strata bench` for both plugins, and for CUDA's without early starts, in turn, three times
each, and shows both ratios. STRATA_CACHE_DIR keeps compiled kernels between calls.

It needs gcc, hip-python (or rocm-bindings-hip and -core), CuPy, libcudart and libnvrtc; where the
loader does not find these two, HIP_ON_CUDA_CUDART and HIP_ON_CUDA_NVRTC name them. They are looked
for in CuPy's companions (the folder `nvidia` of site-packages) and in /usr/local/cuda.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from entry_points import describe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLUGINS = (ROOT / "plugins/cuda", ROOT / "plugins/hip")
READY = "HIP_ON_CUDA_READY"
TURNS = 3


def build(folder: Path) -> Path:
    """ROCM_PATH of the library, with the plugins' entry points beside it."""
    library = folder / "lib" / "libamdhip64.so"
    library.parent.mkdir()
    source = str(HERE / "hip_on_cuda.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True)
    (library.parent / "libhiprtc.so").symlink_to(library.name)
    describe(folder / "site")
    return folder


def library(name: str) -> str:
    """Path of one of NVIDIA's libraries; empty leaves it to the loader."""
    spec = find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations if spec else ())]
    folders.append(Path("/usr/local/cuda/lib64"))
    found = (f for folder in folders for f in sorted(folder.rglob(f"{name}.so*")))
    return str(next(found, ""))


def begin_again(folder: Path) -> int:
    """This program in an environment where hip-python opens the library."""
    rocm = build(folder)
    paths = [ROOT, *PLUGINS, ROOT / "tests/device_sources", rocm / "site"]
    searched = [str(rocm / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        **os.environ,
        READY: "1",
        "ROCM_PATH": str(rocm),
        "LD_LIBRARY_PATH": os.pathsep.join(searched),
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(rocm / "cache"),
    }
    for variable, name in (("CUDART", "libcudart"), ("NVRTC", "libnvrtc")):
        if found := library(name):
            environment.setdefault(f"HIP_ON_CUDA_{variable}", found)
    return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment).returncode


def pass_over_the_system() -> None:
    """The probe asks this machine's runtime alone, not for a driver that is not there."""
    from strata_hip import probe

    probe.find_obstacle = lambda machine: None


def run(script: Path, *arguments: str) -> int:
    """A program of this folder in this process."""
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def make_runtime(folder: Path):
    from strata_core.kernels.code_cache import CodeCache
    from strata_hip.binding import load_binding
    from strata_hip.compiler import Compiler
    from strata_hip.runtime import HipRuntime

    binding = load_binding()
    return HipRuntime(binding, Compiler(binding, CodeCache(folder, print)))


def kernels(*arguments: str) -> int:
    """check_kernels.py with the HIP runtime in the place of its device."""
    import check_kernels
    from kernel_bench import Bench

    def device(folder: Path, number: int) -> Bench:
        runtime = make_runtime(folder)
        print(f"{runtime.devices()[number].name} through HIP", flush=True)
        return Bench(runtime, planes=True, device=number)

    check_kernels.device = device
    sys.argv = ["check_kernels.py", *arguments]
    return check_kernels.main()


def verbs(*arguments: str) -> int:
    """The suite of verbs."""
    import pytest

    suite = str(HERE / "hip_verbs.py")
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-n0", suite, *arguments]))


def quick(*arguments: str) -> int:
    """The verbs, then two_backends.py in what is left of 100 seconds."""
    begin = time.monotonic()
    failed = verbs()
    left = f"{max(10, 85 - (time.monotonic() - begin)):.0f}"
    return run(HERE / "two_backends.py", "--alike", "--seconds", left, *arguments) or failed


def speed(model: str, *arguments: str) -> int:
    """`strata bench` in turn; medians and ratios. 1 where like with like is beyond 5 percent."""
    rates: dict[str, list[float]] = {"cuda": [], "cuda without early starts": [], "hip": []}
    for _ in range(TURNS):
        for name, found in rates.items():
            backend, _, plain = name.partition(" ")
            command = [sys.executable, __file__, "plain-strata" if plain else "strata", "bench"]
            command += [model, "--json", "--backend", backend, *arguments]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout)["decode_tok_s"])
            print(f"{name}: {found[-1]:.2f} tok/s decode", flush=True)
    cuda, alike, hip = (statistics.median(found) for found in rates.values())
    print(f"decode: cuda {cuda:.2f}, without early starts {alike:.2f}, hip {hip:.2f} tok/s")
    print(f"decode: hip over cuda {hip / cuda:.3f}, of like with like {hip / alike:.3f}")
    return 0 if hip > 0.95 * alike else 1


def strata(*arguments: str) -> int:
    from strata_core.cli.main import main

    pass_over_the_system()
    return main(list(arguments))


def plain_strata(*arguments: str) -> int:
    """`strata` with a CUDA plugin that starts no kernel early, as HIP's cannot."""
    from two_backends import no_early_starts

    with no_early_starts():
        return strata(*arguments)


def main() -> int:
    """Build and begin again, or do what was asked."""
    if READY not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            return begin_again(Path(folder))
    sys.path.insert(0, str(HERE))
    what, *rest = sys.argv[1:] or [""]
    pass_over_the_system()
    if what == "identity":
        return run(HERE / "identity.py", "--backend", "hip", *rest)
    known = {"quick": quick, "verbs": verbs, "kernels": kernels, "speed": speed, "strata": strata}
    known["plain-strata"] = plain_strata
    if what not in known:
        print(__doc__)
        return 2
    return known[what](*rest)


if __name__ == "__main__":
    sys.exit(main())
