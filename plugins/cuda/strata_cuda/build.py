"""What a context's options ask of the runtime."""

from __future__ import annotations

from strata_core.interfaces import BackendContext
from strata_core.kernels.code_cache import open_cache
from strata_cuda.binding import load_binding
from strata_cuda.compiler import Compiler
from strata_cuda.runtime import CudaRuntime


def runtime_of(context: BackendContext) -> CudaRuntime:
    """A runtime whose kernels are kept in the cache that the context names. Raises DeviceError."""
    binding = load_binding(context.machine.os)
    cache = open_cache(context.options, context.degrade)
    return CudaRuntime(binding, Compiler(binding, cache))
