"""One stored tensor: its type, its shape and a view of its bytes in the mapped file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

from strata_core.checkpoint.types import WeightType
from strata_core.interfaces import Piece

if TYPE_CHECKING:
    import numpy as np


def lasting(file: Path) -> Path:
    """The file's path as it is good for after the current folder has changed."""
    return file.absolute()


@frozen(eq=False)
class Tensor:
    """A tensor as stored. `shape` is row-major: the last axis is the one that products sum over.

    `data` is a read-only uint8 view [nbytes] of the mapped file; it keeps the mapping alive. `file`
    is made absolute: it may be opened again after the current folder has changed.
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    data: np.ndarray
    file: Path = field(converter=lasting)
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.type.nbytes(prod(self.shape))

    @property
    def piece(self) -> Piece:
        """The tensor's range in its file."""
        return Piece(self.file, self.offset, self.nbytes)

    def item(self, index: int) -> Tensor:
        """The `index`-th slice along the first axis, e.g. one expert of a stacked tensor."""
        rest = self.shape[1:]
        size = self.type.nbytes(prod(rest))
        start = index * size
        return Tensor(
            f"{self.name}[{index}]",
            self.type,
            rest,
            self.data[start : start + size],
            self.file,
            self.offset + start,
        )
