"""What a bound program owns: its weights where they lie, its buffers, its scratch arrays."""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen

from strata_core.interfaces import BlobLayout, ExpertFiles, Limits
from strata_core.kernels.cpu.storage import Storage, Words
from strata_core.kernels.program import Buffer, Rows


@frozen(eq=False)
class Dense:
    """A dense weight where it lies: type, shape [rows, columns], address and size."""

    type: str
    shape: tuple[int, ...]
    address: int
    nbytes: int

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.shape[0]


@frozen(eq=False)
class ExpertLayer:
    """The routed experts of a layer: layout, addresses uint64 [experts, 3], counts served.

    `served` is int64 [2 + experts], which the step `plan` adds to: entries, groups, and the entries
    of each expert.
    """

    layout: BlobLayout
    table: np.ndarray
    served: Words


def served_words(storage: Storage, experts: ExpertFiles) -> Words:
    """Zeroed counts for a layer's experts."""
    return storage.zeros((2 + experts.count,), np.int64)


@define(eq=False)
class Workspace:
    """Buffers that all modes share, made once for a bound program."""

    storage: Storage
    limits: Limits
    top_k: int
    status: np.ndarray
    buffers: dict[str, np.ndarray] = field(factory=dict)
    packs: dict[object, np.ndarray] = field(factory=dict)

    def rows(self, kind: Rows) -> int:
        """Most rows of a kind."""
        most = {"token": self.limits.tokens, "logits": self.limits.logits}
        return most.get(kind, self.limits.tokens * self.top_k)

    def buffer(self, buffer: Buffer) -> np.ndarray:
        """The array of an activation buffer: [rows, width]."""
        if buffer.name not in self.buffers:
            shape = (self.rows(buffer.rows), buffer.width)
            self.buffers[buffer.name] = self.storage.zeros(shape, buffer.dtype)
        return self.buffers[buffer.name]

    def scratch(self, key: object, rows: int, width: int, dtype: str) -> np.ndarray:
        """An array that later uses of the same key and shape share; dtype "pack" is records."""
        full = (key, rows, width, dtype)
        if full not in self.packs:
            make = self.storage.packs if dtype == "pack" else None
            self.packs[full] = (
                make(rows, width) if make else self.storage.zeros((rows, width), dtype)
            )
        return self.packs[full]
