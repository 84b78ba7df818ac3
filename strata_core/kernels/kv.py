"""Keys and values on the host: one pair of arrays a layer and sequence, in the KV type."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Floats = NDArray[np.float32]

KV_TYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16}
"""Storage of one element by `--kv` name; float16 rounds to nearest even."""


def kv_bytes(kv_type: str, layers: int, width: int) -> int:
    """Bytes that one position of one sequence takes, keys and values of all layers together.

    int8 has a half scale for every 32 elements besides (docs/arithmetic.md, section 8).
    """
    if kv_type == "int8":
        return 2 * layers * (width + width // 32 * 2)
    return 2 * layers * width * int(np.dtype(KV_TYPES[kv_type]).itemsize)


@frozen(eq=False)
class KeyValues:
    """The keys and values of one sequence: two arrays [layers, context, width].

    Pages are committed when they are first written, so a long context costs what is used of it.
    """

    keys: NDArray[Any]
    values: NDArray[Any]

    @classmethod
    def allocate(cls, kv_type: str, layers: int, context: int, width: int) -> KeyValues:
        """Zeroed room for `context` positions."""
        shape = (layers, context, width)
        dtype = KV_TYPES[kv_type]
        return cls(np.zeros(shape, dtype), np.zeros(shape, dtype))

    def write(self, layer: int, positions: NDArray[np.int32], k: Floats, v: Floats) -> None:
        """Store rows at positions, rounded to the KV type."""
        self.keys[layer, positions] = k
        self.values[layer, positions] = v

    def read(self, layer: int, start: int, stop: int) -> tuple[Floats, Floats]:
        """Keys and values of positions `start` to `stop - 1` as float32 [positions, width]."""
        return (
            self.keys[layer, start:stop].astype(np.float32, copy=False),
            self.values[layer, start:stop].astype(np.float32, copy=False),
        )
