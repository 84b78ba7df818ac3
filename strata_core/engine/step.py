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
    executor_rows: list[int] = []
    counts: list[int] = []
    start = 0
    for feed in feeds:
        rows = _wanted_rows(feed, start)
        executor_rows.extend(rows)
        counts.append(len(rows))
        start += len(feed.ids)
    logits = executor.run(
        Window(
            ids=np.array([i for f in feeds for i in f.ids], np.int32),
            positions=np.concatenate([_positions(f) for f in feeds]),
            slots=np.repeat(
                np.array([f.sequence.slot for f in feeds], np.int32), [len(f.ids) for f in feeds]
            ),
            logits_rows=np.array(executor_rows, np.int32),
            kernel_class=kernel_class,
        )
    )
    for feed in feeds:
        feed.sequence.ids.extend(feed.ids)
        feed.sequence.classes.extend([kernel_class] * len(feed.ids))
    return list(np.split(logits, np.cumsum(counts)[:-1]))


def _wanted_rows(feed: Feed, start: int) -> range:
    stop = start + len(feed.ids)
    if feed.wanted == "none":
        return range(stop, stop)
    return range(stop - 1 if feed.wanted == "last" else start, stop)


def _positions(feed: Feed) -> NDArray[np.int32]:
    first = len(feed.sequence.ids)
    return np.arange(first, first + len(feed.ids), dtype=np.int32)
