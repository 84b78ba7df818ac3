"""An executor whose logits are plain arithmetic on a sequence's tokens: a test double.

The likeliest token after t0..tn is (sum of ti * (i + 1)) mod vocabulary, so that every mistake in
ids, positions, slots or rollback shows in the tokens. `before_run` may raise or block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.interfaces import Window


def _nothing(_window: Window) -> None:
    return


@define(eq=False)
class ArithmeticExecutor:
    """Stores each slot's tokens by position; keeps the windows it was given."""

    vocabulary: int = 97
    stored: dict[int, dict[int, int]] = field(factory=dict)
    windows: list[Window] = field(factory=list)
    before_run: Callable[[Window], None] = _nothing

    def open_sequence(self) -> int:
        """The lowest free slot."""
        slot = next(i for i in range(len(self.stored) + 1) if i not in self.stored)
        self.stored[slot] = {}
        return slot

    def close_sequence(self, slot: int) -> None:
        """Forget a slot."""
        del self.stored[slot]

    def save(self, slot: int, length: int) -> object:
        """The length says it all."""
        del slot
        return length

    def restore(self, slot: int, snapshot: object) -> None:
        """Later positions are overwritten before they are read."""

    def run(self, window: Window) -> NDArray[np.float32]:
        """One-hot logits at the token that follows."""
        self.before_run(window)
        self.windows.append(window)
        for token, position, slot in zip(window.ids, window.positions, window.slots, strict=True):
            self.stored[int(slot)][int(position)] = int(token)
        out = np.zeros((len(window.logits_rows), self.vocabulary), np.float32)
        for row, index in enumerate(window.logits_rows):
            tokens = self.stored[int(window.slots[index])]
            ids = [tokens[p] for p in range(int(window.positions[index]) + 1)]
            out[row, follow(ids, self.vocabulary)] = 1.0
        return out

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """No experts here."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


def follow(ids: Sequence[int], vocabulary: int = 97) -> int:
    """The token that follows."""
    return sum(token * (i + 1) for i, token in enumerate(ids)) % vocabulary


def continuation(prompt: Sequence[int], n: int, vocabulary: int = 97) -> tuple[int, ...]:
    """The `n` tokens that follow a prompt."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(follow(ids, vocabulary))
    return tuple(ids[len(prompt) :])
