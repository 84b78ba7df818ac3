"""Compiles the device kernels for AMD's architectures, with no device, and shows what they need.

    python tests/device_sources/compile_table.py hiprtc gfx906 gfx90a gfx1030
    python tests/device_sources/compile_table.py clang gfx1100 gfx942 gfx1200

`hiprtc` goes the plugin's own way, hip-python and the library that it opens: ROCM_PATH's, else the
one of Debian's libamdhip64-dev. `clang` is a check with a plain compiler (CLANG, else clang++-19 or
the like) and the builtins in hip_words.h. A line for each kernel and architecture: registers of a
lane and of a wave, spills, bytes of shared and private memory. Leaves with 1 where one does not
compile, with 77 and the reason where there is nothing to compile with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/hip"), str(HERE)]

from code_object import Usage, usages  # noqa: E402
from compilers import NotCompiled, every_key  # noqa: E402

from strata_core.errors import StrataError  # noqa: E402
from strata_core.kernels.code_cache import CodeCache  # noqa: E402
from strata_core.kernels.device.sources import source_of  # noqa: E402
from strata_core.runtime import KernelKey  # noqa: E402

SKIPPED = 77
DEBIAN = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so")
CLANGS = ("clang++-19", "clang++-20", "clang++-21", "clang++")
OPTIONS = (
    "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib",
    "-std=c++17", "-O3", "-ffp-contract=off", "-fdeclspec", "-include", str(HERE / "hip_words.h"),
)  # fmt: skip

Compile = Callable[[KernelKey, str], bytes]


class Missing(Exception):
    """What there is not, to compile with."""


def hiprtc() -> tuple[str, Compile]:
    """The plugin's compiler and its name. Raises Missing."""
    from strata_hip.binding import load_binding
    from strata_hip.compiler import Compiler

    try:
        binding = load_binding()
        compiler = Compiler(binding, CodeCache(None, print))
        version = ".".join(map(str, compiler.version()))
    except StrataError as error:
        raise Missing(" ".join(str(error).split())) from error
    return (
        f"HIP {version} through {binding.package}",
        lambda key, arch: compiler.obtain(key, arch).code,
    )


def clang() -> tuple[str, Compile]:
    """A plain compiler for AMD's architectures and its name. Raises Missing."""
    named = os.environ.get("CLANG")
    found = next(filter(None, map(shutil.which, [named] if named else CLANGS)), None)
    if found is None:
        raise Missing("there is no clang")
    known = subprocess.run([found, "--print-targets"], capture_output=True, text=True, check=False)
    if "amdgcn" not in known.stdout or shutil.which("ld.lld", path=_beside(found)) is None:
        raise Missing(f"{found} has no AMD back end, or no lld beside it")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)

    def run(key: KernelKey, arch: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "code.o"
            command = [found, *OPTIONS, f"--offload-arch={arch}", "-c", "-", "-o", str(target)]
            done = subprocess.run(
                command, input=source_of(key).text, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise NotCompiled(done.stderr)
            return target.read_bytes()

    return version.stdout.splitlines()[0], run


def _beside(compiler: str) -> str:
    return os.pathsep.join([str(Path(compiler).resolve().parent), os.environ.get("PATH", "")])


def sample(keys: list[KernelKey], archs: list[str]) -> list[tuple[KernelKey, str]]:
    """One of each kernel, for one architecture after the other."""
    chosen: dict[str, list[KernelKey]] = {}
    for key in keys:
        chosen.setdefault(key.name, []).append(key)
    middle = [of_name[len(of_name) // 2] for of_name in chosen.values()]
    return [(key, archs[i % len(archs)]) for i, key in enumerate(middle)]


def line(key: KernelKey, arch: str, usage: Usage) -> str:
    name = " ".join(map(str, (key.name, *key.parameters)))
    return (
        f"{name:28} {arch:8} {usage.wave:4} {usage.vgprs:5} {usage.sgprs:5}"
        f" {usage.vgpr_spills:6} {usage.sgpr_spills:6} {usage.shared:6} {usage.private:7}"
    )


def table(compile_: Compile, work: list[tuple[KernelKey, str]], jobs: int) -> int:
    """Print the lines; the number of those that failed."""
    names = ("wave", "vgprs", "sgprs", "vspill", "sspill", "shared", "private")
    print(f"{'kernel':28} {'arch':8}", *names)

    def one(what: tuple[KernelKey, str]) -> tuple[bool, int, str]:
        key, arch = what
        try:
            code = compile_(key, arch)
            (usage,) = (u for u in usages(code) if u.name == source_of(key).entry)
        except (NotCompiled, StrataError, ValueError) as error:
            return False, 0, f"{key.name} {key.parameters} {arch}: {str(error)[:600]}"
        return True, usage.vgpr_spills + usage.sgpr_spills, line(key, arch, usage)

    good = spilling = 0
    with ThreadPoolExecutor(jobs) as pool:
        for compiled, spills, text in pool.map(one, work):
            print(text, flush=True)
            good, spilling = good + compiled, spilling + bool(spills)
    print(f"{good} of {len(work)} compiled, {spilling} spill")
    return len(work) - good


def with_debians() -> None:
    """Begin again with a ROCM_PATH of links to Debian's library, where none is named."""
    if os.environ.get("ROCM_PATH") or not DEBIAN.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lib"
        library.mkdir()
        for name in ("libamdhip64.so", "libhiprtc.so"):  # this HIP has both in one file
            (library / name).symlink_to(DEBIAN)
        environment = {**os.environ, "ROCM_PATH": folder, "LD_LIBRARY_PATH": str(library)}
        command = [sys.executable, __file__, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)


def main() -> int:
    """Parse, compile, print."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("compiler", choices=["hiprtc", "clang"])
    options.add_argument("architectures", nargs="+")
    options.add_argument("--only", default="", help="kernels whose name begins so")
    options.add_argument("--sample", action="store_true", help="each kernel once")
    options.add_argument("--jobs", type=int, default=2, help="compilers at once (clang)")
    asked = options.parse_args()
    if asked.compiler == "hiprtc":
        with_debians()
    try:
        name, compile_ = hiprtc() if asked.compiler == "hiprtc" else clang()
    except Missing as error:
        print(f"nothing is compiled: {error}")
        return SKIPPED
    keys = [key for key in every_key() if key.name.startswith(asked.only)]
    work = [(key, arch) for arch in asked.architectures for key in keys]
    if asked.sample:
        work = sample(keys, asked.architectures)
    print(name, flush=True)
    begin = time.perf_counter()
    jobs = asked.jobs if asked.compiler == "clang" else 1
    failed = table(compile_, work, jobs)
    print(f"in {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
