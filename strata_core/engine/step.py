"""One step: several sequences, each with a few tokens, computed together as one window."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Literal

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.interfaces import Executor, Window

KernelClass = Literal["window", "prompt"]
Wanted = Literal["none", "last", "all"]

WINDOW_PROMPT = 64
"""A whole prompt of at most so many tokens is computed by window kernels."""


@define(eq=False)
class Sequence:
    """A text in the making: its executor slot and the tokens computed so far.

    `ids` are the tokens whose state is stored, `classes` the kernel class that computed each.
    """

    executor: Executor
    slot: int
    ids: list[int] = field(factory=list)
    classes: list[KernelClass] = field(factory=list)

    @classmethod
    def open(cls, executor: Executor) -> Sequence:
        """An empty sequence with a slot of its own."""
        return cls(executor, executor.open_sequence())

    def snapshot(self) -> Snapshot:
        """The state as it is now, to come back to with `rollback`."""
        return Snapshot(len(self.ids), self.executor.save(self.slot, len(self.ids)))

    def rollback(self, snapshot: Snapshot) -> None:
        """Forget every token after the snapshot."""
        if snapshot.length > len(self.ids):
            raise ValueError("the snapshot is of a later state than the sequence")
        self.executor.restore(self.slot, snapshot.state)
        del self.ids[snapshot.length :]
        del self.classes[snapshot.length :]

    def close(self) -> None:
        """Give the slot back."""
        self.executor.close_sequence(self.slot)


@frozen
class Snapshot:
    """A state to return to: the number of tokens, and what the executor keeps besides."""

    length: int
    state: object


@frozen
class Feed:
    """Tokens for one sequence in a step, and of which of them the logits are wanted."""

    sequence: Sequence
    ids: tuple[int, ...]
    wanted: Wanted = "last"


def prompt_class(prompt_tokens: int, *, exact: bool = False) -> KernelClass:
    """The kernel class of a prompt's positions; it depends on the request and the settings alone.

    `exact` is --exact-prompt: window kernels whatever the length.
    """
    return "window" if exact or prompt_tokens <= WINDOW_PROMPT else "prompt"


def step(
    executor: Executor, feeds: Many[Feed], kernel_class: KernelClass = "window"
) -> list[NDArray[np.float32]]:
    """Compute the feeds in one window; per feed the wanted logits [rows, vocabulary].

    The arrays are views that the next step overwrites. After an error no sequence has moved on,
    but state beyond its length may be half written, which the next step overwrites too.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    ends: list[int] = []
    for feed in feeds:
        wanted.extend(_wanted_rows(feed, len(ids)))
        ends.append(len(wanted))
        first, count = len(feed.sequence.ids), len(feed.ids)
        ids.extend(feed.ids)
        positions.extend(range(first, first + count))
        slots.extend([feed.sequence.slot] * count)
    logits = executor.run(
        Window(
            ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            logits_rows=np.array(wanted, np.int32),
            kernel_class=kernel_class,
        )
    )
    rows: list[NDArray[np.float32]] = []
    begin = 0
    for feed, end in zip(feeds, ends, strict=True):
        feed.sequence.ids.extend(feed.ids)
        feed.sequence.classes.extend([kernel_class] * len(feed.ids))
        rows.append(logits[begin:end])
        begin = end
    return rows


def _wanted_rows(feed: Feed, start: int) -> range:
    stop = start + len(feed.ids)
    if feed.wanted == "none":
        return range(stop, stop)
    return range(stop - 1 if feed.wanted == "last" else start, stop)
