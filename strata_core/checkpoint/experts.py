"""Where every routed expert's bytes are in the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from attrs import frozen

from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError
from strata_core.interfaces import BlobLayout, BlobPart, Expert, Piece

PARTS: tuple[Literal["gate", "up", "down"], ...] = ("gate", "up", "down")

Stored = Tensor | tuple[Tensor, ...]
"""One part of a layer's experts: a stacked tensor [experts, rows, columns], or one for each."""


@frozen(eq=False)
class ExpertTable:
    """Implements `interfaces.ExpertFiles` for GGUF files and hub folders.

    `stored` holds (gate, up, down) of each layer with routed experts; all were checked when the
    checkpoint was opened. Immutable; any thread may use it. A blob is the stored bytes of gate, up
    and down one after the other, without gaps.
    """

    count: int
    layouts: Mapping[int, BlobLayout]
    stored: Mapping[int, tuple[Stored, Stored, Stored]]

    def pieces(self, expert: Expert) -> tuple[Piece, Piece, Piece]:
        """The file ranges of gate, up and down. Raises CheckpointError for no such expert."""
        gate, up, down = self._tensors(expert)
        return gate.piece, up.piece, down.piece

    def mapped(self, expert: Expert) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read-only uint8 views of the same ranges in the mapped file; nothing is copied."""
        gate, up, down = self._tensors(expert)
        return gate.data, up.data, down.data

    def _tensors(self, expert: Expert) -> tuple[Tensor, Tensor, Tensor]:
        stored = self.stored.get(expert.layer)
        if stored is None or not 0 <= expert.index < self.count:
            raise CheckpointError(
                f"there is no {expert}",
                f"the model has {self.count} experts in each of its layers {sorted(self.stored)}",
                "ask for one of those",
            )
        gate, up, down = (
            part.item(expert.index) if isinstance(part, Tensor) else part[expert.index]
            for part in stored
        )
        return gate, up, down


def blob_layout(gate: Tensor, up: Tensor, down: Tensor) -> BlobLayout:
    """The layout of a blob whose parts are stored like these matrices [rows, columns]."""
    parts: list[BlobPart] = []
    offset = 0
    for name, tensor in zip(PARTS, (gate, up, down), strict=True):
        rows, columns = tensor.shape
        parts.append(BlobPart(name, tensor.type.name, rows, columns, offset, tensor.nbytes))
        offset += tensor.nbytes
    return BlobLayout((parts[0], parts[1], parts[2]), offset)
