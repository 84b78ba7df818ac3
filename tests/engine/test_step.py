"""step(): windows of several sequences, and state that can be rolled back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.step import Feed, KernelClass, Sequence, prompt_class, step
from strata_core.interfaces import Window
from strata_core.testing.arithmetic_executor import ArithmeticExecutor, follow

IDS = st.lists(st.integers(0, 96), min_size=1, max_size=6).map(tuple)


def test_each_feed_gets_its_own_rows() -> None:
    executor = ArithmeticExecutor()
    a, b, c = (Sequence.open(executor) for _ in range(3))
    rows = step(
        executor, [Feed(a, (5, 6), "all"), Feed(b, (7, 8, 9), "none"), Feed(c, (1,), "last")]
    )
    assert [len(r) for r in rows] == [2, 0, 1]
    assert [int(r.argmax()) for r in rows[0]] == [follow([5]), follow([5, 6])]
    assert int(rows[2][0].argmax()) == follow([1])


@given(
    before=st.lists(st.lists(st.integers(0, 96), max_size=5), min_size=1, max_size=4),
    data=st.data(),
    kernel_class=st.sampled_from(["window", "prompt"]),
)
def test_the_window_says_what_is_fed_and_wanted(
    before: list[list[int]], data: st.DataObject, kernel_class: KernelClass
) -> None:
    executor = ArithmeticExecutor()
    sequences = [Sequence.open(executor) for _ in before]
    for sequence, ids in zip(sequences, before, strict=True):
        if ids:
            step(executor, [Feed(sequence, tuple(ids), "none")])
    one = st.tuples(st.integers(0, 96))
    feeds = [
        Feed(
            sequence,
            data.draw(st.one_of(one, IDS)),
            data.draw(st.sampled_from(["none", "last", "all"])),
        )
        for sequence in data.draw(st.permutations(sequences))
    ]
    told = [
        (token, len(feed.sequence.ids) + i, feed.sequence.slot)
        for feed in feeds
        for i, token in enumerate(feed.ids)
    ]
    flags = [
        feed.wanted == "all" or (feed.wanted == "last" and i == len(feed.ids) - 1)
        for feed in feeds
        for i in range(len(feed.ids))
    ]
    texts = [[*feed.sequence.ids, *feed.ids] for feed in feeds]
    rows = step(executor, feeds, kernel_class)
    window = executor.windows[-1]
    arrays = (window.ids, window.positions, window.slots)
    assert list(zip(*(a.tolist() for a in arrays), strict=True)) == told
    assert window.logits_rows.tolist() == [i for i, wanted in enumerate(flags) if wanted]
    assert {a.dtype for a in (*arrays, window.logits_rows)} == {np.dtype(np.int32)}
    assert window.kernel_class == kernel_class
    for feed, text, logits in zip(feeds, texts, rows, strict=True):
        count = {"none": 0, "last": 1, "all": len(feed.ids)}[feed.wanted]
        assert logits.shape == (count, 97)
        ends = range(len(text) - count + 1, len(text) + 1)
        assert logits.argmax(axis=1).tolist() == [follow(text[:end]) for end in ends]
        assert feed.sequence.ids == text
        assert feed.sequence.classes[-len(feed.ids) :] == [kernel_class] * len(feed.ids)


def test_the_logits_are_views_of_the_executors() -> None:
    class Still(ArithmeticExecutor):
        def run(self, window: Window) -> np.ndarray:
            self.last = super().run(window)
            return self.last

    executor = Still()
    a, b = (Sequence.open(executor) for _ in range(2))
    rows = step(executor, [Feed(a, (5, 6), "all"), Feed(b, (7,))])
    executor.last[:] = [[1.5], [2.5], [3.5]]
    assert [r[:, 0].tolist() for r in rows] == [[1.5, 2.5], [3.5]]


@given(st.lists(st.tuples(st.integers(0, 2), IDS), min_size=1, max_size=12))
def test_interleaving_sequences_changes_nothing(feeds: list[tuple[int, tuple[int, ...]]]) -> None:
    executor = ArithmeticExecutor()
    sequences = [Sequence.open(executor) for _ in range(3)]
    for which, ids in feeds:
        sequence = sequences[which]
        (logits,) = step(executor, [Feed(sequence, ids)])
        assert int(logits[0].argmax()) == follow(sequence.ids)


@given(before=IDS, lost=IDS, after=IDS)
def test_a_rollback_forgets_what_came_after(
    before: tuple[int, ...], lost: tuple[int, ...], after: tuple[int, ...]
) -> None:
    executor = ArithmeticExecutor()
    sequence = Sequence.open(executor)
    step(executor, [Feed(sequence, before)], "prompt")
    snapshot = sequence.snapshot()
    step(executor, [Feed(sequence, lost)])
    sequence.rollback(snapshot)
    (logits,) = step(executor, [Feed(sequence, after)])
    assert sequence.ids == [*before, *after]
    assert sequence.classes == ["prompt"] * len(before) + ["window"] * len(after)
    assert int(logits[0].argmax()) == follow([*before, *after])


def test_a_snapshot_of_the_future_is_refused() -> None:
    executor = ArithmeticExecutor()
    sequence = Sequence.open(executor)
    start = sequence.snapshot()
    step(executor, [Feed(sequence, (1, 2))])
    later = sequence.snapshot()
    sequence.rollback(start)
    with pytest.raises(ValueError, match="later state"):
        sequence.rollback(later)


def test_a_failed_run_moves_no_sequence_on() -> None:
    executor = ArithmeticExecutor()
    sequence = Sequence.open(executor)

    def fail(_window: object) -> None:
        raise OSError("gone")

    executor.before_run = fail
    with pytest.raises(OSError, match="gone"):
        step(executor, [Feed(sequence, (1, 2))])
    assert sequence.ids == []
    assert sequence.classes == []


@pytest.mark.parametrize(("tokens", "wanted"), [(1, "window"), (64, "window"), (65, "prompt")])
def test_the_class_of_a_prompt_depends_on_its_length(tokens: int, wanted: str) -> None:
    assert prompt_class(tokens) == wanted
    assert prompt_class(tokens, exact=True) == "window"
