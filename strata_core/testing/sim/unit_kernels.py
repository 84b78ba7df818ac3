"""Products of prompts on matrix units on the host: the order of docs/arithmetic.md, 11, in numpy.

Records lie as the CPU has them, as everywhere on the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact_math
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.layout import RECORD_BYTES, WAVE, inner_bytes, record_bytes
from strata_core.kernels.exact_quant import Activations, quantise
from strata_core.kernels.exact_units import rows_product
from strata_core.memory.address import bytes_at

if TYPE_CHECKING:
    from strata_core.testing.sim.args import Args
    from strata_core.testing.sim.host_kernels import HostKernels

Ready = Callable[[], None]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_RECORD = np.dtype([("q", "<i2", (256,)), ("d", "<f4", (8,)), ("sum", "<i4", (8,))])
assert _RECORD.itemsize == RECORD_BYTES


def linear(_kernels: HostKernels, a: Args, type_name: str) -> Ready:
    """`matrix_linear`."""

    def ready() -> None:
        x = _activations(a.x + np.arange(a.tokens) * record_bytes(a.columns), a.columns)
        bias = bytes_at(a.bias, 4 * a.rows).view(np.float32) if a.bias else None
        shape = (a.rows, a.columns)
        made = rows_product(type_name, _stored(type_name, a.weight, a.stride, *shape), *shape, x)
        out = bytes_at(a.out, made.nbytes).view(np.float32)
        out[:] = (made if bias is None else made + bias).ravel()

    return ready


def gate_up(_kernels: HostKernels, a: Args, gate: str, up: str, down: str) -> Ready:
    """`matrix_gate_up`."""

    def ready() -> None:
        shape = (a.rows, a.columns)
        for cell, entries in _wave(a):
            x = _activations(a.x + entries // a.top_k * record_bytes(a.columns), a.columns)
            matrices = ((gate, cell["gate"], a.gate_stride), (up, cell["up"], a.up_stride))
            both = [
                rows_product(name, _stored(name, int(at), stride, *shape), *shape, x)
                for name, at, stride in matrices
            ]
            with np.errstate(all="ignore"):
                inner: Floats = exact_math.silu(both[0]) * both[1]
            for entry, row in zip(entries, inner, strict=True):
                _store_inner(a, int(entry), row, down)

    return ready


def down(_kernels: HostKernels, a: Args, type_name: str) -> Ready:
    """`matrix_down`."""

    def ready() -> None:
        shape = (a.rows, a.columns)
        for cell, entries in _wave(a):
            x = _activations(a.inner + entries * inner_bytes(a.columns), a.columns)
            data = _stored(type_name, int(cell["down"]), a.stride, *shape)
            for entry, row in zip(entries, rows_product(type_name, data, *shape, x), strict=True):
                bytes_at(a.out + int(entry) * row.nbytes, row.nbytes).view(np.float32)[:] = row

    return ready


def _wave(a: Args) -> Iterator[tuple[np.void, Ints]]:
    """Each expert's cell of a wave, and its entries where it has any."""
    for cell in bytes_at(a.wave, WAVE.itemsize * a.experts).view(WAVE):
        at = a.starts + 4 * int(cell["expert"])
        begin, end = (int(v) for v in bytes_at(at, 8).view(np.int32))
        if begin < end:
            here = bytes_at(a.order + 4 * begin, 4 * (end - begin))
            yield cell, here.view(np.int32).astype(np.int64)


def _stored(type_name: str, at: int, stride: int, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows as stored, without what lies between them."""
    kind = TYPES[type_name]
    nbytes = columns // kind.block * kind.block_bytes
    whole = bytes_at(at, (rows - 1) * stride + nbytes)
    return np.stack([whole[r * stride : r * stride + nbytes] for r in range(rows)])


def _activations(places: Ints, columns: int) -> Activations:
    """The records at some places, as far as there are blocks."""
    blocks = columns // 32
    raw = [bytes_at(int(at), record_bytes(columns)).view(_RECORD) for at in places]
    records = np.stack(raw)
    q = records["q"].reshape(len(raw), -1, 32)[:, :blocks].astype(np.int32)
    scale, total = (records[name].reshape(len(raw), -1)[:, :blocks] for name in ("d", "sum"))
    return Activations(q, scale, total, finite=True)


def _store_inner(a: Args, entry: int, row: Floats, type_name: str) -> None:
    """An entry's inner activations, as the type of `down` wants them."""
    at = a.inner + entry * inner_bytes(a.rows)
    if type_name not in UNPACK:
        bytes_at(at, row.nbytes).view(np.float32)[:] = row
        return
    made, count = quantise(row[None]), a.rows // 32
    if not made.finite:
        status = bytes_at(a.status, 4).view(np.uint32)
        status[0] = min(int(status[0]), a.op)
    records = bytes_at(at, record_bytes(a.rows)).view(_RECORD)
    for k in range(count):
        record, j = records[k // 8], k % 8
        record["q"][32 * j : 32 * j + 32] = made.q[0, k]
        record["d"][j], record["sum"][j] = made.scale[0, k], made.sum[0, k]
