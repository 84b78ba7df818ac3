"""step(): windows of several sequences, and state that can be rolled back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.step import Feed, Sequence, prompt_class, step
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


@pytest.mark.parametrize(("tokens", "wanted"), [(1, "window"), (64, "window"), (65, "prompt")])
def test_the_class_of_a_prompt_depends_on_its_length(tokens: int, wanted: str) -> None:
    assert prompt_class(tokens) == wanted
    assert prompt_class(tokens, exact=True) == "window"
