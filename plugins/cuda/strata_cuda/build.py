"""What a context's options ask of the runtime."""

from __future__ import annotations

from pathlib import Path

from strata_core.config import cache_folder
from strata_core.interfaces import BackendContext
from strata_core.kernels.code_cache import CodeCache
from strata_cuda.binding import load_binding
from strata_cuda.compiler import Compiler
from strata_cuda.runtime import CudaRuntime


def runtime_of(context: BackendContext) -> CudaRuntime:
    """A runtime whose kernels are kept in the cache that the context names. Raises DeviceError."""
    named = context.options.get("cache_dir")
    folder = Path(named) if named else cache_folder()
    cache = CodeCache(folder and folder / "kernels", context.degrade)
    binding = load_binding(context.machine.os)
    return CudaRuntime(binding, Compiler(binding, cache))
