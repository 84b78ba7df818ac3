"""Random and edge inputs for cases: stored weights, activations, records, tables of entries."""

from __future__ import annotations

import numpy as np
from kernel_bench import RECORD

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.layout import STATUS_BYTES
from strata_core.kernels.exact_quant import quantise

FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(name for name in TYPES if name not in FLOATS)

_MINIMUMS = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}


def stored_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes of a row]: random bytes with scales ordinary, tiny, zero and negative."""
    if name in FLOATS:
        return _float_rows(name, rows, columns, rng)
    kind = TYPES[name]
    raw = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    for offset in _scale_offsets(name):
        scale = rng.standard_normal(raw.shape[:2]) * 0.02
        scale[1::5] *= 1e-5
        scale[2::5, ::2] = 0
        raw[..., offset : offset + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(110, 135, raw.shape[:2])
        raw[1::5, :, 0] = rng.integers(0, 3, raw[1::5].shape[:2])
    return raw.reshape(rows, -1)


def _scale_offsets(name: str) -> tuple[int, ...]:
    """Where a block's half scales lie."""
    if name == "MXFP4":
        return ()
    return (0, 2) if name in _MINIMUMS else (208,) if name == "Q6_K" else (0,)


def extreme_rows(name: str, columns: int) -> np.ndarray:
    """uint8 [rows, bytes of a row]: rows whose integers are all as large as a type has them."""
    kind = TYPES[name]
    rows = []
    for value, scales in ((0, 0), (255, 255), (0, 128), (0, 127), (255, 127), (127, 128), (136, 9)):
        row = np.full((columns // kind.block, kind.block_bytes), value, np.uint8)
        if name == "Q6_K":
            row[:, 192:208] = scales
        elif name in ("Q4_K", "Q5_K"):
            row[:, 4:16] = scales
        elif name == "MXFP4":
            row[:, 0] = 120
        for offset in _scale_offsets(name):
            row[:, offset : offset + 2] = np.array([0.013], "<f2").view(np.uint8)
        rows.append(row.reshape(-1))
    return np.array(rows)


def _float_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    if name == "BF16":
        return (w.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(rows, -1)
    if name == "F16":
        w[1::5] *= np.float32(1e-6)
    return w.astype({"F32": "<f4", "F16": "<f2"}[name]).view(np.uint8).reshape(rows, -1)


def activations(tokens: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [tokens, columns] with blocks of zeros, of tiny, huge and denormal values."""
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    x[0, :16] = np.arange(-8, 8) + 0.5
    if tokens > 1 and columns >= 128:
        x[1, :32] = 0
        x[1, 32:64] *= np.float32(1e-37)
        x[1, 64:96] *= np.float32(1e20)
        x[1, 96:128] *= np.float32(1e-42)
    return x


def records_of(x: np.ndarray) -> np.ndarray:
    """Quantised rows: RECORD [tokens, records]."""
    tokens, columns = x.shape
    made = quantise(x)
    out = np.zeros((tokens, -(-columns // 256)), RECORD)
    blocks = columns // 32
    for name, value in (("d", made.scale), ("sum", made.sum)):
        flat = np.zeros((tokens, out.shape[1] * 8), value.dtype)
        flat[:, :blocks] = value
        out[name] = flat.reshape(tokens, -1, 8)
    q = np.zeros((tokens, out.shape[1] * 8, 32), np.int16)
    q[:, :blocks] = made.q
    out["q"] = q.reshape(tokens, -1, 256)
    return out


def nothing_latched() -> np.ndarray:
    """A status word and what is kept beside it."""
    return np.full(STATUS_BYTES // 4, 0xFFFFFFFF, np.uint32)


def narrow_columns(name: str) -> tuple[int, ...]:
    """Row lengths worth trying: a short one, one that ends within 256, a long one."""
    if name in FLOATS:
        return 40, 200, 1024
    return (256, 768, 2304) if TYPES[name].block == 256 else (96, 352, 2336)
