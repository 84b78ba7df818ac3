"""Run-time compilers that need no device: NVRTC from its wheel, hiprtc through hip-python."""

from __future__ import annotations

import ctypes
import itertools
from importlib.util import find_spec
from pathlib import Path

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.runtime import KernelKey

CUDA_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "-std=c++17")
HIP_OPTIONS = ("-ffp-contract=off", "-std=c++17", "-O3")
KV_TYPES = ("fp32", "fp16", "int8")
HEAD_DIMS = (64, 80, 128, 256)


class NotCompiled(Exception):
    """What the compiler said."""


def every_key() -> list[KernelKey]:
    """Every kernel of the table for every parameter; experts' mixed types as files have them."""
    keys = []
    for name, kernel in DEVICE_KERNELS.items():
        choices = [_choices(parameter) for parameter in kernel.parameters]
        for parameters in itertools.product(*choices):
            if name.endswith("gate_up") and not _together(*map(str, parameters)):
                continue
            keys.append(KernelKey(name, parameters))
    return keys


def _choices(parameter: str) -> tuple[str | int, ...]:
    if parameter == "kv":
        return KV_TYPES
    return HEAD_DIMS if parameter == "head_dim" else tuple(TYPES)


def _together(gate: str, up: str, down: str) -> bool:
    """Gate and up of one type; down of the same, or of a type that mixtures pair with it."""
    return gate == up and (down in (gate, "Q6_K", "Q8_0", "F32") or gate == "Q4_K")


class Nvrtc:
    """NVRTC by ctypes. Raises LookupError where it is not installed."""

    def __init__(self) -> None:
        spec = find_spec("nvidia")
        folders = [Path(p) for p in (spec.submodule_search_locations if spec else [])]
        found = [f for folder in folders for f in sorted(folder.rglob("libnvrtc.so*"))]
        if not found:
            raise LookupError("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
        for builtins in found[0].parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(found[0]))

    def compile(self, text: str, name: str, architecture: str) -> bytes:
        """A cubin for an architecture like "sm_90". Raises NotCompiled."""
        program = ctypes.c_void_p()
        call = self._library.nvrtcCreateProgram
        call(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        options = [f"--gpu-architecture={architecture}", *CUDA_OPTIONS]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = self._library.nvrtcCompileProgram(program, len(options), array)
        log = self._text(program, "ProgramLog")
        if status:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
            raise NotCompiled(log.decode(errors="replace"))
        code = self._text(program, "CUBIN")
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return code

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw
