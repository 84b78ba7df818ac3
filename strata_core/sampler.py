"""From logits to a token: penalties, filters, and random numbers keyed by seed and position.

The random number of a position depends on (seed, position) alone, so a continuation is the same
whether tokens are drawn one by one, in windows, or after a rollback. Numbers come from Philox4x64
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as key and
position + 1 as counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from attrs import Attribute, field, frozen
from numpy.typing import NDArray

from strata_core.errors import EngineError, UsageError

Floats = NDArray[np.float32]

_STRONGEST = 1e30
_LARGEST = float(np.finfo(np.float32).max)
"""Bounds within which no penalised score overflows to an infinity or becomes no number."""


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _at_least(
    low: float, high: float = float("inf"), *, above: bool = False, whole: bool = False
) -> Any:
    def check(_owner: object, attribute: Attribute[Any], value: Any) -> None:
        if not _is_number(value, Integral if whole else Real):
            raise UsageError(
                f"--{attribute.name.replace('_', '-')} {value!r} is not a number it can have",
                f"a {'whole ' if whole else ''}number is wanted",
                "leave it out to get the default",
            )
        if not (low < value if above else low <= value) or not value <= high:
            bound = f"{'above' if above else 'at least'} {low:g}"
            bound += f" and at most {high:g}" if high != float("inf") else ""
            raise UsageError(
                f"--{attribute.name.replace('_', '-')} {value} is out of range",
                f"it must be {bound}",
                "leave it out to get the default",
            )

    return check


@frozen(kw_only=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy: the largest logit, ties to the lowest id.

    `top_k` 0, `top_p` 1 and `min_p` 0 keep everything; they apply in that order after the
    temperature. `repetition_penalty` (1: none) divides positive and multiplies negative logits of
    the ids seen in the last `repetition_window` tokens of prompt and continuation
    (Keskar et al. 2019, CTRL); 0 looks at all of them.
    """

    temperature: float = field(default=0.0, validator=_at_least(0.0))
    top_k: int = field(default=0, validator=_at_least(0, whole=True))
    top_p: float = field(default=1.0, validator=_at_least(0.0, 1.0, above=True))
    min_p: float = field(default=0.0, validator=_at_least(0.0, 1.0))
    repetition_penalty: float = field(default=1.0, validator=_at_least(0.0, above=True))
    repetition_window: int = field(default=0, validator=_at_least(0, whole=True))
    seed: int = field(default=0, validator=_at_least(0, 2**64 - 1, whole=True))


def sample(logits: Floats, sampling: Sampling, history: Sequence[int], position: int) -> int:
    """The token that follows at `position`, from its float32 logits [vocabulary].

    `history` are the ids before it, for the repetition penalty. `logits` is not changed. Raises
    EngineError where a logit is not a number or none is finite.
    """
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise EngineError(
            f"the logits of position {position} are not finite",
            "a weight or an activation overflowed, or the file is damaged",
            "compare the model file's checksum with its source, or use another model",
        )
    scores = _penalised(logits, sampling, history)
    if sampling.temperature == 0:
        return int(scores.argmax())
    # The largest becomes 0 first, so that no temperature, however small, overflows it.
    relative = scores.astype(np.float64) - float(scores.max())
    with np.errstate(over="ignore"):
        kept, weights = _filtered(relative / sampling.temperature, sampling)
    point = uniform(sampling.seed, position) * weights.sum()
    return int(kept[min(int(np.searchsorted(weights.cumsum(), point, "right")), len(kept) - 1)])


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: the top 53 bits of Philox4x64's first word."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(word) >> 11) * 2.0**-53


def _penalised(logits: Floats, sampling: Sampling, history: Sequence[int]) -> Floats:
    if sampling.repetition_penalty == 1 or not history:
        return logits
    seen = np.unique(np.asarray(history[-sampling.repetition_window :], dtype=np.int64))
    scores = logits.copy()
    old = scores[seen]
    penalty = np.float32(min(max(sampling.repetition_penalty, 1 / _STRONGEST), _STRONGEST))
    with np.errstate(over="ignore"):
        changed = np.where(old > 0, old / penalty, old * penalty)
    scores[seen] = changed.clip(-_LARGEST, _LARGEST)
    return scores


def _filtered(
    scores: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Ids kept by the filters, likeliest first (ties: lowest id first), with their weights.

    `scores` are at most 0, the largest is 0.
    """
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(scores[order])
    if sampling.top_p < 1:
        share = weights.cumsum() / weights.sum()
        keep = int(np.searchsorted(share, sampling.top_p, "left")) + 1
        order, weights = order[:keep], weights[:keep]
    if sampling.min_p > 0:
        keep = int((weights >= sampling.min_p * weights[0]).sum())
        order, weights = order[:keep], weights[:keep]
    return order, weights
