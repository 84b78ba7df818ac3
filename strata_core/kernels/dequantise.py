"""Stored weights to float32, in two steps: unpack into integers and scales, then the formula.

The byte layouts are those of ggml's block types. Every quantised type is unpacked into the same
record of 32-weight blocks (`Blocks`), on which an exact integer product can be built as well. A
weight is

    (d * scale) * q - dmin * low + offset

in float32, each operation rounded, parts that a type does not have left out. That is bit for bit
what the ggml project's own dequantisation gives.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from attrs import frozen

from strata_core.checkpoint.types import TYPES, WeightType
from strata_core.errors import CheckpointError

_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The 4-bit floats (E2M1) doubled, so that they are whole numbers; the scale is halved for it."""


CHUNK = 1 << 16
"""Weights that are dequantised at a time: their temporaries stay near the processor."""


@frozen(eq=False)
class Blocks:
    """N blocks of 32 weights, unpacked.

    `q` int8 [N, 32]; `d` float32 [N]; `scales` int8 or uint8 [N, S], each for 32/S weights, or
    None; `dmin` float32 [N] and `low` uint8 [N], both or None; `offset` float32 [N] or None.
    """

    q: np.ndarray
    d: np.ndarray
    scales: np.ndarray | None = None
    dmin: np.ndarray | None = None
    low: np.ndarray | None = None
    offset: np.ndarray | None = None


def dequantise(type_name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Weights stored as `type_name` in `data` (uint8 [nbytes]) as a new float32 array of `shape`.

    The last axis must be whole blocks. Raises CheckpointError for an unknown type and ValueError
    where bytes and shape do not agree. Damaged scales (infinite, not a number) give such weights;
    they raise no warning. Beside the result at most a few times `CHUNK` weights are held.
    """
    kind = _known(type_name)
    if data.size != kind.nbytes(prod(shape)):
        raise ValueError(f"{data.size} bytes of {type_name} do not make the shape {shape}")
    result = np.empty(prod(shape), np.float32)
    stored = data.reshape(-1, kind.block_bytes)
    blocks = max(1, CHUNK // kind.block)
    for first in range(0, len(stored), blocks):
        part = _values(type_name, stored[first : first + blocks])
        result[first * kind.block :][: part.size] = part.ravel()
    return result.reshape(shape)


def _values(type_name: str, stored: np.ndarray) -> np.ndarray:
    if type_name in _FLOATS:
        return _FLOATS[type_name](stored)
    return weights(unpack(type_name, stored))


def unpack(type_name: str, data: np.ndarray) -> Blocks:
    """Unpack whole blocks of a quantised type; a K-quant's 256 weights become eight blocks."""
    if type_name not in _UNPACK:
        raise ValueError(f"{_known(type_name).name} is not made of blocks")
    return _UNPACK[type_name](data.reshape(-1, TYPES[type_name].block_bytes))


def weights(blocks: Blocks) -> np.ndarray:
    """The weights of unpacked blocks, float32 [N, 32]."""
    with np.errstate(invalid="ignore", over="ignore"):
        scale = blocks.d[:, None]
        if blocks.scales is not None:
            scale = scale * blocks.scales.astype(np.float32)
        runs = blocks.q.reshape(len(blocks.q), scale.shape[1], -1)
        result = (scale[:, :, None] * runs.astype(np.float32)).reshape(-1, 32)
        if blocks.dmin is not None and blocks.low is not None:
            result = result - (blocks.dmin * blocks.low.astype(np.float32))[:, None]
        if blocks.offset is not None:
            result = result + blocks.offset[:, None]
    return np.asarray(result, np.float32)


def _known(type_name: str) -> WeightType:
    found = TYPES.get(type_name)
    if found is None:
        raise CheckpointError(
            f"weights of type {type_name[:40]!r} cannot be read",
            f"known types: {', '.join(TYPES)}",
            "use a checkpoint with one of those types",
        )
    return found


# --- floats ------------------------------------------------------------------------------------


def _f32(data: np.ndarray) -> np.ndarray:
    return data.view("<f4").astype(np.float32)


def _f16(data: np.ndarray) -> np.ndarray:
    return data.view("<f2").astype(np.float32)


def _bf16(data: np.ndarray) -> np.ndarray:
    """A bfloat16 is the upper half of a float32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}


# --- fields of a block -------------------------------------------------------------------------


def _half(rows: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, widened."""
    return np.ascontiguousarray(rows[:, at : at + 2]).view("<f2").astype(np.float32).ravel()


def _nibbles(rows: np.ndarray, run: int) -> np.ndarray:
    """4-bit fields: of each `run` bytes all low ones, then all high ones. uint8 [N, 2 * bytes]."""
    parts = rows.reshape(len(rows), -1, 1, run)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(rows), -1)


def _bits(rows: np.ndarray) -> np.ndarray:
    """32 single bits from four bytes, the lowest first. uint8 [N, 32]."""
    return np.unpackbits(np.ascontiguousarray(rows), axis=1, bitorder="little")


def _signed(q: np.ndarray, centre: int) -> np.ndarray:
    return (q.astype(np.int16) - centre).astype(np.int8)


# --- 32-weight types ---------------------------------------------------------------------------


def _q8_0(rows: np.ndarray) -> Blocks:
    return Blocks(np.ascontiguousarray(rows[:, 2:]).view(np.int8), _half(rows, 0))


def _q4_0(rows: np.ndarray) -> Blocks:
    return Blocks(_signed(_nibbles(rows[:, 2:], 16), 8), _half(rows, 0))


def _q4_1(rows: np.ndarray) -> Blocks:
    q = _nibbles(rows[:, 4:], 16).astype(np.int8)
    return Blocks(q, _half(rows, 0), offset=_half(rows, 2))


def _q5_0(rows: np.ndarray) -> Blocks:
    q = _nibbles(rows[:, 6:], 16) | (_bits(rows[:, 2:6]) << 4)
    return Blocks(_signed(q, 16), _half(rows, 0))


def _q5_1(rows: np.ndarray) -> Blocks:
    q = _nibbles(rows[:, 8:], 16) | (_bits(rows[:, 4:8]) << 4)
    return Blocks(q.astype(np.int8), _half(rows, 0), offset=_half(rows, 2))


def _mxfp4(rows: np.ndarray) -> Blocks:
    """The scale is 2^(exponent - 127), halved; exponents 0 and 1 give denormals."""
    exponent = rows[:, 0].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23)
    return Blocks(_MXFP4_VALUES[_nibbles(rows[:, 1:], 16)], bits.astype(np.uint32).view(np.float32))


# --- 256-weight types (K-quants) ---------------------------------------------------------------


def _k_scales(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit lows from 12 bytes, each uint8 [N, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 lows 0-3 in their lower six bits; bytes 8-11 hold the
    lower four bits of scales (low nibble) and lows (high nibble) 4-7, whose upper two bits are the
    upper two of bytes 0-3 and 4-7.
    """
    scale, low, both = rows[:, 0:4], rows[:, 4:8], rows[:, 8:12]
    return (
        np.concatenate([scale & 63, (both & 15) | ((scale >> 2) & 48)], axis=1),
        np.concatenate([low & 63, (both >> 4) | ((low >> 2) & 48)], axis=1),
    )


def _k_blocks(rows: np.ndarray, q: np.ndarray) -> Blocks:
    """Blocks of a type with 6-bit scales and lows; `q` is [N, 256]."""
    scales, low = _k_scales(rows[:, 4:16])
    return Blocks(
        q.astype(np.int8).reshape(-1, 32),
        np.repeat(_half(rows, 0), 8),
        scales.reshape(-1, 1),
        np.repeat(_half(rows, 2), 8),
        low.reshape(-1),
    )


def _q4_k(rows: np.ndarray) -> Blocks:
    return _k_blocks(rows, _nibbles(rows[:, 16:], 32))


def _q5_k(rows: np.ndarray) -> Blocks:
    """Bit b of high byte i belongs to weight i of block b."""
    high = (rows[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = _nibbles(rows[:, 48:], 32) | (high.reshape(len(rows), 256) << 4)
    return _k_blocks(rows, q)


def _q6_k(rows: np.ndarray) -> Blocks:
    """Two halves of 128 weights: 64 bytes of low nibbles and 32 bytes of two upper bits each."""
    low = _nibbles(rows[:, :128], 64)
    pairs = rows[:, 128:192].reshape(len(rows), 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    q = _signed(low | (high.reshape(len(rows), 256) << 4), 32)
    scales = np.ascontiguousarray(rows[:, 192:208]).view(np.int8)
    return Blocks(q.reshape(-1, 32), np.repeat(_half(rows, 208), 8), scales.reshape(-1, 2))


_UNPACK: dict[str, Callable[[np.ndarray], Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
