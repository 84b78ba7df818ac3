"""The exact mode for whole programs: the kernel table's functions on top of `exact.py`.

Handed to the interpreter instead of the float32 kernels, with dense weights as `Matrix`. Keys and
values are float32 or float16. Slow: it is for tests that compare whole runs bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from strata_core.interfaces import BlobPart, Expert, Weights
from strata_core.kernels import exact
from strata_core.kernels.exact import Matrix
from strata_core.kernels.exact_float import Floats, Ints, widen
from strata_core.kernels.program import Program, Weight
from strata_core.kernels.reference import Frame
from strata_core.memory.address import bytes_at


def matrices(program: Program, weights: Weights) -> dict[Weight, Matrix]:
    """The dense weights of a program as stored; a vector is a matrix of one row."""
    found = {}
    for weight in program.weights():
        type_name, shape, data = weights.raw(weight.role, weight.layer)
        rows = shape[0] if len(shape) > 1 else 1
        found[weight] = Matrix(type_name, rows, shape[-1], data)
    return found


def _vector(weight: Matrix) -> Floats:
    return widen(weight.type, weight.data)


def embed(frame: Frame, table: Matrix, out: Floats) -> None:
    """Section 3.3."""
    out[:] = exact.embed(frame.ids, table)


def rms_norm(frame: Frame, x: Floats, weight: Matrix, out: Floats, dim: int, eps: float) -> None:
    """Section 6."""
    del frame
    out[:] = exact.rms_norm(x, _vector(weight), dim, eps)


def linear(frame: Frame, x: Floats, weight: Matrix, bias: Matrix | None, out: Floats) -> None:
    """Sections 3 and 4."""
    del frame
    out[:] = exact.linear(x, weight, None if bias is None else _vector(bias))


def rope(frame: Frame, x: Floats, heads: int, head_dim: int) -> None:
    """Section 7."""
    del head_dim
    x[:] = exact.rope(x, frame.cos, frame.sin, heads)


def kv_append(frame: Frame, k: Floats, v: Floats, layer: int) -> None:
    """Section 8; a value that overflows float16 is found here as it is there."""
    for run in frame.runs:
        rows = slice(run.start, run.stop)
        kv_type = "fp16" if run.kv.keys.dtype == np.float16 else "fp32"
        kept = [exact.kv_round(x[rows], kv_type) for x in (k, v)]
        run.kv.write(layer, frame.positions[rows], kept[0], kept[1])


def attention(
    frame: Frame,
    q: Floats,
    out: Floats,
    layer: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
) -> None:
    """Section 9."""
    for run in frame.runs:
        rows = slice(run.start, run.stop)
        positions = frame.positions[rows]
        stored = run.kv.read(layer, 0, int(positions[-1]) + 1)
        keys, values = (x.reshape(len(x), kv_heads, head_dim) for x in stored)
        queries = q[rows].reshape(-1, heads, head_dim)
        mixed = exact.attention(queries, keys, values, positions, window)
        out[rows] = mixed.reshape(len(queries), -1)


def add(frame: Frame, x: Floats, y: Floats) -> None:
    """Section 10."""
    del frame
    x += y


def silu_mul(frame: Frame, gate: Floats, up: Floats, out: Floats) -> None:
    """Section 10."""
    del frame
    out[:] = exact.silu_mul(gate, up)


def route(
    frame: Frame, logits: Floats, picks: Ints, weights: Floats, top_k: int, renormalise: bool
) -> None:
    """Section 10."""
    del frame
    chosen, kept = exact.route(logits, top_k, renormalise=renormalise)
    picks.reshape(chosen.shape)[:] = chosen
    weights.reshape(kept.shape)[:] = kept


def experts(frame: Frame, x: Floats, picks: Ints, out: Floats, layer: int) -> None:
    """Section 10: each picked expert's unweighted row."""
    reader = frame.experts
    parts = reader.files.layouts[layer].parts
    flat = picks.reshape(-1)
    tokens = np.arange(len(flat)) // (len(flat) // len(x))
    needed = [int(index) for index in np.unique(flat)]
    reader.begin_layer(layer, needed)
    for index in needed:
        expert = Expert(layer, index)
        view = reader.source.view(expert)
        try:
            gate, up, down = (_part(p, a) for p, a in zip(parts, view.parts, strict=True))
            rows = np.flatnonzero(flat == index)
            out[rows] = exact.expert(x[tokens[rows]], gate, up, down)
        finally:
            reader.source.release(expert)


def _part(part: BlobPart, address: int) -> Matrix:
    return Matrix(part.type, part.rows, part.columns, bytes_at(address, part.nbytes))


def combine(frame: Frame, x: Floats, rows: Floats, weights: Floats, top_k: int) -> None:
    """Section 10."""
    del frame
    by_token = rows.reshape(len(x), top_k, -1)
    x[:] = exact.combine(x, by_token, weights.reshape(len(x), top_k))


def gate_add(frame: Frame, x: Floats, y: Floats, gate: Floats) -> None:
    """Section 10."""
    del frame
    x[:] = exact.gate_add(x, y, gate)


def gather(frame: Frame, x: Floats, out: Floats) -> None:
    """Copies rows."""
    out[:] = x[frame.logits_rows]


EXACT_KERNELS: Mapping[str, Callable[..., None]] = {
    kernel.__name__: kernel
    for kernel in (
        embed,
        rms_norm,
        linear,
        rope,
        kv_append,
        attention,
        add,
        silu_mul,
        route,
        experts,
        combine,
        gate_add,
        gather,
    )
}
"""The exact mode's function for every name of the kernel table."""
