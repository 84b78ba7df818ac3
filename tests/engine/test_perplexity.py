"""Perplexity against the formula, in windows of any size, and on logits that are none."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.perplexity import perplexity
from strata_core.errors import EngineError, UsageError

VOCABULARY = 7


def row(token: int) -> np.ndarray:
    """The logits that follow a token, as if from a model without memory."""
    return np.random.default_rng(token).normal(size=VOCABULARY).astype(np.float32)


def chunks(ids: tuple[int, ...], size: int = 3) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(ids), size):
        yield start, np.array([row(i) for i in ids[start : start + size]])


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=40), st.integers(2, 45))
def test_it_is_the_mean_over_whole_windows(ids: list[int], context: int) -> None:
    size = min(context, len(ids))
    losses = [
        np.log(np.exp(row(ids[i]).astype(float)).sum()) - float(row(ids[i])[ids[i + 1]])
        for i in range(len(ids) // size * size)
        if (i + 1) % size
    ]
    result = perplexity(ids, context, chunks)
    assert result.nll == pytest.approx(np.mean(losses), abs=1e-9)
    assert result.perplexity == pytest.approx(exp(result.nll))
    assert (result.tokens, result.left_out) == (len(losses), len(ids) % size)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    def damaged(ids: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        for start, logits in chunks(ids):
            logits[:, 1] = value
            yield start, logits

    with pytest.raises(EngineError, match="not finite") as caught:
        perplexity((0, 0, 0, 0, 0, 1), 3, lambda ids: (damaged if 1 in ids else chunks)(ids))
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize(("ids", "context"), [((), 5), ((1,), 5), ((1, 2), 1), ((1, 2), -5)])
def test_too_little_text_or_context_is_refused(ids: tuple[int, ...], context: int) -> None:
    with pytest.raises(UsageError):
        perplexity(ids, context, chunks)
