"""Device sources to code objects through hiprtc, kept in core's cache."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from strata_core.errors import DeviceError
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.driver import Compiled, obtain_code
from strata_core.kernels.device.sources import Source, source_of
from strata_core.runtime import KernelKey
from strata_hip.architectures import check_known
from strata_hip.binding import Binding, answer_of, checked, first_of

OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")
"""Denormals are kept and divisions and roots correctly rounded by default."""


class Compiler:
    """Compiles for any architecture; needs no device. Thread-safe as far as hiprtc is."""

    def __init__(self, binding: Binding, cache: CodeCache | None = None) -> None:
        """Nothing is opened yet."""
        self._binding = binding
        self._cache = cache
        self._rocm: tuple[int, int, int] | None = None

    def obtain(self, key: KernelKey, architecture: str) -> Compiled:
        """A kernel's code object and its entry. Raises DeviceError."""
        facts = ("hip", architecture, ".".join(map(str, self.version())), *OPTIONS)
        make = partial(self.compile, architecture=architecture)
        return obtain_code(self._cache, source_of(key), facts, make)

    def compile(self, source: Source, architecture: str) -> bytes:
        """A code object, without the cache. Raises DeviceError with the compiler's words."""
        check_known(architecture, self.version()[:2])
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
            status = first_of(
                answer_of(verb, rtc.hiprtcCompileProgram, program, len(options), options)
            )
            if int(status):
                raise DeviceError(
                    f"{verb} failed",
                    self._log(program) or f"hiprtc answers {status}",
                    "check that this ROCm knows the architecture, or update it",
                )
            code = bytearray(checked(verb, rtc.hiprtcGetCodeSize, program))
            checked(verb, rtc.hiprtcGetCode, program, code)
        finally:
            with suppress(DeviceError):  # the code is there, or an error that matters more
                checked("free a program", rtc.hiprtcDestroyProgram, program.createRef())
        return bytes(code)

    def _log(self, program: object) -> str:
        rtc = self._binding.hiprtc
        log = bytearray(checked("read a log", rtc.hiprtcGetProgramLogSize, program))
        if log:
            checked("read a log", rtc.hiprtcGetProgramLog, program, log)
        return log.rstrip(b"\0").decode(errors="replace").strip()

    def version(self) -> tuple[int, int, int]:
        """The runtime's version, (6, 4, 43483); hiprtc's own says 9.0 for every ROCm."""
        if self._rocm is None:
            hip = self._binding.hip
            found = int(checked("ask the HIP library's version", hip.hipRuntimeGetVersion))
            self._rocm = found // 10**7, found // 10**5 % 100, found % 10**5
        return self._rocm
