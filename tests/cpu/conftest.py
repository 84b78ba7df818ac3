"""Compiled steps to call from tests, one set for each variant that this machine runs."""

import ctypes

import numpy as np
import pytest

from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.products import RECORD
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.target import VARIANTS, Target, host_target
from strata_core.kernels.exact_quant import TWO_PLANES


class Kernels:
    """Steps of one variant (or a whole Target), called with numpy arrays."""

    def __init__(self, variant, cache, largest=TWO_PLANES):
        target = variant if isinstance(variant, Target) else host_target(variant)
        self.library = Library(Compiler(target, cache, print), largest)
        self.status = np.array([NOTHING_LATCHED], np.uint32)

    def call(self, name, parameters, args, units, begin=0):
        """Run units `begin` .. `units` - 1; arrays are passed by address."""
        block = np.array([a.ctypes.data if isinstance(a, np.ndarray) else a for a in args], "<i8")
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(
            self.library.address(Step(name, parameters))
        )
        function(block.ctypes.data, begin, units)

    def quantise(self, x, layout="rows"):
        """Records of float32 rows: (pack uint8 [T, pitch], addresses int64 [T])."""
        tokens, width = x.shape
        groups = -(-width // 256)
        pack = aligned(tokens, (groups * RECORD // 64 | 1) * 64)
        args = [np.ascontiguousarray(x), pack, width, pack.shape[1], self.status, 7]
        self.call("quantise" if layout == "rows" else "quantise_tiles", (), args, tokens)
        return pack, addresses(pack)

    def linear(
        self, type_name, data, rows, length, tokens, xs, bias=None, chunk=16, out=None, tiles=False
    ):
        """Step `linear` over all rows: float32 [tokens, rows]."""
        out = np.full((tokens, rows), np.nan, np.float32) if out is None else out
        count = np.array([tokens], np.int64)
        ys = addresses(out)
        args = [data, data.nbytes // rows, length, count, xs, ys, rows, chunk, bias]
        args[-1] = 0 if bias is None else bias
        kind = (type_name, "tiles") if tiles else (type_name,)
        self.call("linear", kind, args, -(-rows // chunk))
        return out


def aligned(rows, pitch):
    """Zeroed uint8 [rows, pitch] on a 64-byte boundary."""
    raw = np.zeros(rows * pitch + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * pitch].reshape(rows, pitch)


def addresses(rows):
    """Address of each row, int64."""
    return rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]


def shifted(data, by):
    """A copy of uint8 data at an address that is `by` bytes past a multiple of 64."""
    raw = np.zeros(data.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + by
    raw[start : start + data.nbytes] = data
    return raw[start : start + data.nbytes]


def usable(variant):
    """Skip where this processor lacks the variant's instructions."""
    from strata_core.errors import UsageError

    try:
        host_target(variant)
    except UsageError as error:
        pytest.skip(error.why)


@pytest.fixture(scope="session")
def cache(compiled_kernels):
    """A cache folder for the whole run."""
    return compiled_kernels


@pytest.fixture(scope="session", params=VARIANTS)
def kernels(request, cache):
    """Kernels of each variant."""
    usable(request.param)
    return Kernels(request.param, cache)


@pytest.fixture(scope="session")
def tools():
    """The helpers above."""

    class Tools:
        kernels = Kernels

    Tools.aligned, Tools.addresses, Tools.shifted, Tools.usable = map(
        staticmethod, (aligned, addresses, shifted, usable)
    )
    return Tools
