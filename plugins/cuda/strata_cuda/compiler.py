"""From a kernel's key to machine code: NVRTC, with a folder of what was compiled before.

Options are those of docs/arithmetic.md, section 13: no contraction, full-precision division and
root, no flush to zero.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from strata_core.errors import REPORT, DeviceError
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.driver import Compiled, obtain_code
from strata_core.kernels.device.sources import Source, source_of
from strata_core.runtime import KernelKey
from strata_cuda.binding import Binding

OPTIONS = (
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "-std=c++17",
    "-default-device",
)

NO_NVRTC = "pip install nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13"


class Compiler:
    """Compiles kernels for devices' architectures. Any thread may call it."""

    def __init__(self, binding: Binding, cache: CodeCache | None = None) -> None:
        self._nvrtc = binding.compiler
        self._call = binding.call
        self._cache = cache
        self._lock = Lock()
        self._facts: tuple[str, tuple[int, ...]] | None = None
        self.compiled = 0
        """Kernels that were not found in the cache."""

    def obtain(self, key: KernelKey, architecture: str) -> Compiled:
        """Machine code, or PTX, for an architecture like "sm_90". Raises DeviceError."""
        version, known = self._known()
        target = target_of(architecture, known)
        facts = ("cuda", target, version, *OPTIONS)
        return obtain_code(self._cache, source_of(key), facts, lambda s: self._compile(s, target))

    def _known(self) -> tuple[str, tuple[int, ...]]:
        """The compiler's version, and the architectures it has machine code for."""
        if self._facts is None:
            try:
                version = self._call("find NVRTC", self._nvrtc.getVersion)
                known = self._call("find NVRTC", self._nvrtc.getSupportedArchs)
            except (DeviceError, OSError, ImportError) as error:
                why = error.why if isinstance(error, DeviceError) else str(error)
                raise DeviceError("kernels cannot be compiled: no NVRTC", why, NO_NVRTC) from error
            self._facts = ".".join(map(str, version)), tuple(sorted(int(a) for a in known))
        return self._facts

    def _compile(self, source: Source, target: str) -> bytes:
        with self._lock:
            self.compiled += 1
        nvrtc, label = self._nvrtc, f"compile {source.name}"
        program = self._call(label, nvrtc.createProgram, source.text, source.name, (), ())
        try:
            options = (f"--gpu-architecture={target}", *OPTIONS)
            try:
                nvrtc.compileProgram(program, options)
            except RuntimeError as error:
                raise _rejected(source, target, nvrtc.getProgramLog(program)) from error
            result = nvrtc.getCUBIN if target.startswith("sm_") else nvrtc.getPTX
            return _bytes(self._call(label, result, program))
        finally:
            nvrtc.destroyProgram(program)


def target_of(architecture: str, known: tuple[int, ...]) -> str:
    """What to compile for: the architecture, or PTX of the newest before it that is known.

    A compiler older than a device has no machine code for it; the driver translates PTX.
    """
    number = int(architecture.removeprefix("sm_"))
    if number in known:
        return architecture
    older = [n for n in known if n < number]
    if not older:
        raise DeviceError(
            f"kernels cannot be compiled for {architecture}",
            f"this NVRTC knows {', '.join(f'sm_{n}' for n in known)}",
            "install CuPy for CUDA 12, whose compiler knows older devices",
        )
    return f"compute_{max(older)}"


def _rejected(source: Source, target: str, log: Any) -> DeviceError:
    text = log if isinstance(log, str) else bytes(log).decode(errors="replace")
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["?"]
    return DeviceError(f"{source.name} does not compile for {target}", lines[0], REPORT)


def _bytes(code: Any) -> bytes:
    return code.encode() if isinstance(code, str) else bytes(code)
