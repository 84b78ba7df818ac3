"""Compilers that need no device, and what each says that a kernel needs.

`hiprtc` and `nvrtc` go the plugins' own ways: their compiler objects with their options, over the
library that hip-python opens and over NVRTC from its wheel. `clang` is a check with a plain
compiler (CLANG, else clang++-19 or the like) and the builtins in hip_words.h.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import local

from attrs import asdict, frozen
from code_object import usages

from strata_core.checkpoint.types import TYPES
from strata_core.errors import StrataError
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.prompt_table import MATRIX_HEADS, MATRIX_NAMES, attending
from strata_core.kernels.device.sources import FLOATS, source_of
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.runtime import KernelKey

HERE = Path(__file__).resolve().parent
OF_FLOATS = ("norm_linear", "prompt_floats")
KV_TYPES = ("fp32", "fp16", "int8")
HEAD_DIMS = (64, 80, 128, 256)
CLANGS = ("clang++-19", "clang++-20", "clang++-21", "clang++")
WORDS = HERE / "hip_words.h"
CLANG_OPTIONS = (
    "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib",
    "-std=c++17", "-O3", "-ffp-contract=off", "-fdeclspec", "-include", str(WORDS),
)  # fmt: skip


class Missing(Exception):
    """What there is not, to compile with."""


class NotCompiled(Exception):
    """What the compiler said."""


@frozen
class Needs:
    """What a kernel needs: registers of a thread, spilled ones (or bytes of them), bytes of memory.

    `private` is a thread's own memory, spills and arrays that are indexed at run time.
    """

    registers: int
    spills: int
    shared: int
    private: int
    more: str


Compile = Callable[[KernelKey, str], Needs]


@frozen
class Toolchain:
    """A compiler: its name with the version, what it is told beside the source, what it does.

    `matrix`: whether its devices have the kernels for matrix units.
    """

    name: str
    options: tuple[str, ...]
    compile: Compile
    matrix: bool = False


def kept(tools: Toolchain, cache: CodeCache) -> tuple[Compile, list[KernelKey]]:
    """What a kernel needs, from the cache where the same was compiled before; and which were."""
    found: list[KernelKey] = []

    def run(key: KernelKey, arch: str) -> Needs:
        name = CodeCache.key(tools.name, arch, *tools.options, source_of(key).text)
        known = cache.read(name)
        if known is None:
            needs = tools.compile(key, arch)
            cache.write(name, json.dumps(asdict(needs)).encode())
            return needs
        found.append(key)
        return Needs(**json.loads(known))

    return run, found


def every_key(*, matrix: bool) -> list[KernelKey]:
    """Every kernel of the table for every parameter; experts' mixed types as files have them.

    `matrix`: with those for matrix units.
    """
    keys = []
    for name, kernel in DEVICE_KERNELS.items():
        on_units = name in MATRIX_NAMES
        if on_units and not matrix:
            continue
        heads = tuple(sorted(MATRIX_HEADS)) if on_units else HEAD_DIMS
        choices = [_choices(parameter, heads) for parameter in kernel.parameters]
        for parameters in itertools.product(*choices):
            if name == "products" and not _mixed(*map(str, parameters)):
                continue
            if name in OF_FLOATS and parameters[0] not in FLOATS:
                continue
            if name == "prompt_linear" and parameters[0] in FLOATS:
                continue
            if name.endswith("gate_up") and not _together(*map(str, parameters)):
                continue
            if on_units and not _taken(name, parameters):
                continue
            keys.append(KernelKey(name, parameters))
    return keys


def _taken(name: str, parameters: tuple[str | int, ...]) -> bool:
    """Whether matrix units take such rows, or such keys and heads."""
    if name == "matrix_attention":
        return attending(str(parameters[0]), int(parameters[1]), matrix=True) == name
    return parameters[0] not in FLOATS


def _choices(parameter: str, heads: tuple[int, ...]) -> tuple[str | int, ...]:
    if parameter == "kv":
        return KV_TYPES
    return heads if parameter == "head_dim" else tuple(TYPES)


def _mixed(first: str, second: str, third: str) -> bool:
    """Types of q, k and v: the same, or v of another one; none of them floats."""
    if FLOATS & {first, second, third} or first != second:
        return False
    return third == first or (first, third) in {("Q4_K", "Q6_K"), ("Q5_K", "Q6_K")}


def _together(gate: str, up: str, down: str) -> bool:
    """Gate and up of one type; down of the same, or of a type that mixtures pair with it."""
    return gate == up and (down in (gate, "Q6_K", "Q8_0", "F32") or gate == "Q4_K")


def _amd(code: bytes, key: KernelKey) -> Needs:
    """What a code object says of its one kernel."""
    (found,) = (u for u in usages(code) if u.name == source_of(key).entry)
    return Needs(
        found.vgprs,
        found.vgpr_spills + found.sgpr_spills,
        found.shared,
        found.private,
        f"wave {found.wave}, {found.sgprs} sgprs",
    )


def hiprtc() -> Toolchain:
    """The HIP plugin's compiler. Raises Missing."""
    from strata_hip.binding import load_binding
    from strata_hip.compiler import OPTIONS, Compiler

    try:
        binding = load_binding()
        compiler = Compiler(binding)
        version = ".".join(map(str, compiler.version()))
    except StrataError as error:
        raise Missing(" ".join(str(error).split())) from error
    name = f"hiprtc of HIP {version} through {binding.package}"
    return Toolchain(name, OPTIONS, lambda key, arch: _amd(compiler.obtain(key, arch).code, key))


def clang() -> Toolchain:
    """A plain compiler for AMD's architectures. Raises Missing."""
    named = os.environ.get("CLANG")
    found = next(filter(None, map(shutil.which, [named] if named else CLANGS)), None)
    if found is None:
        raise Missing("there is no clang")
    known = subprocess.run([found, "--print-targets"], capture_output=True, text=True, check=False)
    if "amdgcn" not in known.stdout or shutil.which("ld.lld", path=_beside(found)) is None:
        raise Missing(f"{found} has no AMD back end, or no lld beside it")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)

    def run(key: KernelKey, arch: str) -> Needs:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "code.o"
            command = [found, *CLANG_OPTIONS, f"--offload-arch={arch}", "-c", "-"]
            done = subprocess.run(
                [*command, "-o", str(target)],
                input=source_of(key).text,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise NotCompiled(done.stderr)
            return _amd(target.read_bytes(), key)

    options = (*CLANG_OPTIONS[:-1], WORDS.read_text("utf-8"))
    return Toolchain(version.stdout.splitlines()[0], options, run)


def _beside(compiler: str) -> str:
    return os.pathsep.join([str(Path(compiler).resolve().parent), os.environ.get("PATH", "")])


def nvrtc() -> Toolchain:
    """The CUDA plugin's compiler over NVRTC's wheel. Raises Missing."""
    from strata_cuda.binding import Binding
    from strata_cuda.compiler import OPTIONS, Compiler

    library = Nvrtc()
    compiler = Compiler(Binding(None, None, library, None))
    version = ".".join(map(str, library.getVersion()))

    def run(key: KernelKey, arch: str) -> Needs:
        if int(arch.removeprefix("sm_")) not in library.getSupportedArchs():
            raise NotCompiled("this NVRTC has no machine code for it")
        compiler.obtain(key, arch)
        return library.needs()

    return Toolchain(f"NVRTC {version}", OPTIONS, run, matrix=True)


class Nvrtc:
    """NVRTC by ctypes under the names of CuPy's `cuda.nvrtc`. Raises Missing.

    The assembler is asked what a kernel needs; `needs` tells it of this thread's last program.
    """

    def __init__(self) -> None:
        spec = find_spec("nvidia")
        folders = [Path(p) for p in (spec.submodule_search_locations if spec else [])]
        found = [f for folder in folders for f in sorted(folder.rglob("libnvrtc.so*"))]
        if not found:
            raise Missing("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
        for builtins in found[0].parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(found[0]))
        self._last = local()

    def _call(self, name: str, *args: object) -> None:
        status = self._library[f"nvrtc{name}"](*args)
        if status:
            raise RuntimeError(f"nvrtc{name} answers {status}")

    def getVersion(self) -> tuple[int, int]:  # noqa: N802 - CuPy's name, and so on
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:  # noqa: N802
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return list(found)

    def createProgram(self, text, name, headers, names) -> ctypes.c_void_p:  # noqa: N802
        program = ctypes.c_void_p()
        given = (text.encode(), name.encode(), 0, None, None)
        self._call("CreateProgram", ctypes.byref(program), *given)
        return program

    def compileProgram(self, program, options) -> None:  # noqa: N802
        asked = [o.encode() for o in (*options, "--ptxas-options=-v")]
        array = (ctypes.c_char_p * len(asked))(*asked)
        self._call("CompileProgram", program, len(asked), array)
        self._last.log = self.getProgramLog(program)

    def getProgramLog(self, program) -> str:  # noqa: N802
        return self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    def getCUBIN(self, program) -> bytes:  # noqa: N802
        return self._text(program, "CUBIN")

    def destroyProgram(self, program) -> None:  # noqa: N802
        self._call("DestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def needs(self) -> Needs:
        """What the assembler said."""
        return needs_of(self._last.log)


def needs_of(log: str) -> Needs:
    """The assembler's words on one kernel. Raises ValueError where it said nothing."""
    used = re.search(r"Used (\d+) registers, used (\d+) barriers(?:, (\d+) bytes smem)?", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    if used is None or frame is None:
        raise ValueError(f"the assembler does not say what the kernel needs: {log[:200]!r}")
    private, stores, loads = map(int, frame.groups())
    shared = int(used.group(3) or 0)
    return Needs(int(used.group(1)), stores + loads, shared, private, f"{used.group(2)} barriers")


COMPILERS: dict[str, Callable[[], Toolchain]] = {
    "hiprtc": hiprtc,
    "clang": clang,
    "nvrtc": nvrtc,
}
