"""Device sources to code objects through hiprtc, kept in core's cache."""

from __future__ import annotations

from strata_core.errors import DeviceError
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.sources import Source, source_of
from strata_core.runtime import KernelKey
from strata_hip.binding import Binding, checked

OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")
"""Denormals are kept and divisions and roots correctly rounded by default."""


class Compiler:
    """Compiles for any architecture; needs no device. Thread-safe as far as hiprtc is."""

    def __init__(self, binding: Binding, cache: CodeCache) -> None:
        self._binding = binding
        self._cache = cache
        self._version = ""

    def compiled(self, key: KernelKey, architecture: str) -> tuple[bytes, str]:
        """A kernel's code object and the name of its entry. Raises DeviceError."""
        source = source_of(key)
        identity = ("hip", architecture, self._compiler_version(), *OPTIONS, source.text)
        name = CodeCache.key(*identity)
        code = self._cache.read(name)
        if code is None:
            code = self.compile(source, architecture)
            self._cache.write(name, code)
        return code, source.entry

    def compile(self, source: Source, architecture: str) -> bytes:
        """A code object, without the cache. Raises DeviceError with the compiler's words."""
        rtc, verb = self._binding.hiprtc, f"compile {source.name} for {architecture}"
        program = checked(
            verb,
            rtc.hiprtcCreateProgram,
            source.text.encode(),
            source.name.encode(),
            0,
            None,
            None,
        )
        try:
            options = [o.encode() for o in (f"--offload-arch={architecture}", *OPTIONS)]
            answer = rtc.hiprtcCompileProgram(program, len(options), options)
            status = answer[0] if isinstance(answer, tuple) else answer
            if int(status):
                raise DeviceError(
                    f"{verb} failed",
                    self._log(program) or f"hiprtc answers {status}",
                    "check that this ROCm knows the architecture, or update it",
                )
            code = bytearray(checked(verb, rtc.hiprtcGetCodeSize, program))
            checked(verb, rtc.hiprtcGetCode, program, code)
        finally:
            rtc.hiprtcDestroyProgram(program.createRef())
        return bytes(code)

    def _log(self, program: object) -> str:
        rtc = self._binding.hiprtc
        log = bytearray(checked("read a log", rtc.hiprtcGetProgramLogSize, program))
        if log:
            checked("read a log", rtc.hiprtcGetProgramLog, program, log)
        return log.rstrip(b"\0").decode(errors="replace").strip()

    def _compiler_version(self) -> str:
        if not self._version:
            found = checked("ask hiprtc's version", self._binding.hiprtc.hiprtcVersion)
            self._version = ".".join(map(str, found))
        return self._version
