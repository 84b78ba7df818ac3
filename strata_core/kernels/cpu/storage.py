"""Arrays whose addresses stand in argument blocks, kept for as long as the blocks are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.kernels.cpu.crew import LINE
from strata_core.kernels.cpu.products import RECORD

Words = NDArray[np.int64]


class Storage:
    """Makes arrays and keeps them; one thread."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, thing: Any) -> None:
        """Hold a reference to something whose address is used."""
        self._kept.append(thing)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A zeroed array on a cache line; pages that are never touched take no memory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.zeros(size + LINE, np.uint8)
        start = -raw.ctypes.data % LINE
        made: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
        self._kept.append(made)
        return made

    def words(self, values: Sequence[int]) -> int:
        """Address of a block of int64 values."""
        made = self.zeros((len(values),), np.int64)
        made[:] = values
        return int(made.ctypes.data)

    def addresses(self, rows: NDArray[Any]) -> int:
        """Address of a list with the address of each row."""
        return self.words(row_addresses(rows).tolist())

    def packs(self, rows: int, width: int) -> NDArray[np.uint8]:
        """Records for quantised rows of `width` elements: uint8 [rows, pitch].

        The pitch is an odd number of cache lines, so that rows do not fall on the same lines of
        the first-level cache.
        """
        lines = -(-width // 256) * RECORD // LINE | 1
        return self.zeros((rows, lines * LINE), np.uint8)


def row_addresses(rows: NDArray[Any]) -> Words:
    """Address of each row of an array."""
    steps: Words = np.arange(len(rows), dtype=np.int64) * rows.strides[0]
    return steps + rows.ctypes.data
