"""Perplexity of a text: windows that do not overlap, each judged from its second token on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.errors import EngineError, UsageError


@frozen
class Perplexity:
    """Mean negative log-likelihood (nats a token), its exponential, and what it was taken over.

    `tokens` were judged in `windows` windows; `left_out` tokens at the end filled no window.
    """

    nll: float
    perplexity: float
    tokens: int
    windows: int
    left_out: int


def windows_of(ids: Sequence[int], context: int) -> list[tuple[int, ...]]:
    """Full windows of `context` tokens, or the one shorter window that a short text makes."""
    if len(ids) < 2:
        raise UsageError(
            f"a text of {len(ids)} tokens has no perplexity",
            "the first token of a window is given, so at least two are needed",
            "give a longer text",
        )
    if context < 2:
        raise UsageError(
            f"--context {context} is too small",
            "the first token of a window is given, so at least two are needed",
            "leave --context out to get the default",
        )
    size = min(context, len(ids))
    return [tuple(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]


def perplexity(
    ids: Sequence[int],
    context: int,
    logits_of: Callable[[tuple[int, ...]], Iterable[tuple[int, NDArray[np.float32]]]],
    on_window: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Judge `ids`; `logits_of` gives chunks of (first position, logits) for one window.

    `on_window(done, total)` is called after each window.
    """
    windows = windows_of(ids, context)
    total = 0.0
    count = 0
    for number, window in enumerate(windows, 1):
        for start, logits in logits_of(window):
            followers = window[start + 1 : start + 1 + len(logits)]
            total += _negative_log_likelihood(logits[: len(followers)], followers)
            count += len(followers)
        if on_window is not None:
            on_window(number, len(windows))
    nll = total / count
    return Perplexity(
        nll=nll,
        perplexity=exp(min(nll, 700.0)),
        tokens=count,
        windows=len(windows),
        left_out=len(ids) - sum(map(len, windows)),
    )


def _negative_log_likelihood(logits: NDArray[np.float32], ids: Sequence[int]) -> float:
    if not np.isfinite(logits).all():
        raise EngineError(
            "the text cannot be judged: the model's logits are not finite",
            "a weight or an activation overflowed, or the file is damaged",
            "compare the model file's checksum with its source, or use another model",
        )
    scores = logits.astype(np.float64)
    top = scores.max(axis=1)
    norm = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    return float((norm - scores[np.arange(len(ids)), list(ids)]).sum())
