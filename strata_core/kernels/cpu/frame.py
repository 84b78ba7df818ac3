"""What a window gives to the kernels: ids, positions, places of its tokens, and counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.checkpoint.hyper import Rope
from strata_core.interfaces import Limits, Window
from strata_core.kernels.cpu.attention import KV_BYTES, PLACE_FIELDS
from strata_core.kernels.cpu.storage import Storage, Words
from strata_core.kernels.exact import SPLIT
from strata_core.kernels.program import Rows
from strata_core.kernels.rope import angles

DOMAINS: tuple[Rows, ...] = ("token", "pick", "logits")


@frozen(eq=False)
class KvStore:
    """Keys and values of one sequence, [layers, context, width], in the KV type."""

    arrays: tuple[NDArray[np.uint8], ...]
    place: tuple[int, ...] = field(init=False)
    """Addresses in the order of PLACE_FIELDS."""

    @place.default
    def _addresses(self) -> tuple[int, ...]:
        return tuple(int(a.ctypes.data) for a in self.arrays)

    @classmethod
    def allocate(cls, kv_type: str, layers: int, context: int, width: int) -> KvStore:
        """Room for `context` positions; pages are committed when they are first written."""
        size = layers * context * width
        scales = layers * context * (width // 32) * 2 if kv_type == "int8" else 0
        values = size * KV_BYTES[kv_type]
        return cls(tuple(np.zeros(n, np.uint8) for n in (values, values, scales, scales)))


@define(eq=False)
class Splits:
    """How attention with one sliding window is cut for the tokens at hand."""

    window: int
    kv_heads: int
    splits: Words
    units: Words
    whole_units: Words


class Frame:
    """Fixed arrays that `fill` writes before each run; kernels know their addresses."""

    def __init__(self, storage: Storage, limits: Limits, rope: Rope, top_k: int) -> None:
        self._storage = storage
        self._rope = rope
        self._top_k = top_k
        self.counts = storage.zeros((len(DOMAINS),), np.int64)
        self.one = storage.words([1])
        self.ids = storage.zeros((limits.tokens,), np.int32)
        self.positions = storage.zeros((limits.tokens,), np.int32)
        self.places = storage.zeros((limits.tokens, len(PLACE_FIELDS)), np.int64)
        self.logits_rows = storage.zeros((limits.logits,), np.int32)
        self.cos = storage.zeros((limits.tokens, rope.dim // 2), np.float32)
        self.sin = storage.zeros((limits.tokens, rope.dim // 2), np.float32)
        self._splits: dict[tuple[int, int], Splits] = {}

    def count(self, rows: Rows) -> int:
        """Address of the number of rows of a kind."""
        return int(self.counts.ctypes.data) + 8 * DOMAINS.index(rows)

    def splits(self, window: int | None, kv_heads: int) -> Splits:
        """The counts of attention with this sliding window (None: all positions)."""
        key = (window or 0, kv_heads)
        if key not in self._splits:
            cells = [self._storage.zeros((1,), np.int64) for _ in range(3)]
            self._splits[key] = Splits(*key, *cells)
        return self._splits[key]

    def fill(self, window: Window, sequences: Sequence[KvStore]) -> None:
        """Write a window; `sequences` are those of its tokens, one each."""
        tokens, wanted = len(window.ids), len(window.logits_rows)
        self.counts[:] = tokens, tokens * self._top_k, wanted
        self.ids[:tokens] = window.ids
        self.positions[:tokens] = window.positions
        self.logits_rows[:wanted] = window.logits_rows
        self.places[:tokens] = [s.place for s in sequences]
        self.cos[:tokens], self.sin[:tokens] = angles(self._rope, window.positions)
        positions = np.asarray(window.positions, np.int64)
        for cut in self._splits.values():
            first = np.maximum(positions - cut.window + 1, 0) if cut.window else 0 * positions
            most = int((positions // SPLIT - first // SPLIT).max(initial=0)) + 1
            cut.splits[0] = most
            cut.units[0] = tokens * cut.kv_heads * most
            cut.whole_units[0] = tokens * cut.kv_heads
