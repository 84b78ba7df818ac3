"""From logits to a token: penalties, filters, and random numbers keyed by seed and position.

The random number of a position depends on (seed, position) alone, so a continuation is the same
whether tokens are drawn one by one, in windows, or after a rollback. Numbers come from Philox4x64
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as key and
position + 1 as counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
from attrs import Attribute, field, frozen
from numpy.typing import NDArray

from strata_core.errors import Degradation, EngineError, UsageError
from strata_core.interfaces import BackendContext
from strata_core.kernels.exact_math import exp

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
            least, most = (int(low), high) if whole else (f"{low:g}", f"{high:g}")
            bound = f"{'above' if above else 'at least'} {least}"
            bound += f" and at most {most}" if high != float("inf") else ""
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


class Sampler(Protocol):
    """Whatever draws tokens as `sample` does."""

    def __call__(
        self, logits: Floats, sampling: Sampling, history: Sequence[int], position: int, /
    ) -> int:
        """The token that follows at `position`; see `sample`."""


def sample(logits: Floats, sampling: Sampling, history: Sequence[int], position: int) -> int:
    """The token that follows at `position`, from its float32 logits [vocabulary].

    `history` are the ids before it, for the repetition penalty. `logits` is not changed. Raises
    EngineError where a logit is not a number or none is finite. docs/arithmetic.md, section 12,
    plainly; `open_sampler` gives the same compiled.
    """
    _check_finite(logits, position)
    scores = _penalised(logits, sampling, history)
    if sampling.temperature == 0:
        return int(scores.argmax())
    weights = _weights(scores, sampling)
    point = (_random_bits(sampling.seed, position) * int(weights.sum())) >> 53
    return int(np.searchsorted(weights.cumsum(), point, "right"))


def open_sampler(context: BackendContext) -> Sampler:
    """The compiled sampler, for one thread; where nothing can be compiled, `sample` itself."""
    try:
        from strata_core.kernels.cpu.backend import compiler_of
        from strata_core.kernels.cpu.sampling import CompiledDraw
    except ImportError as error:
        context.degrade(
            Degradation(
                what="tokens are drawn without compiled code",
                why=f"the package llvmlite cannot be used: {error}",
                cost="the same tokens, some milliseconds later each",
                remedy="pip install llvmlite",
            )
        )
        return sample
    draw = CompiledDraw(compiler_of(context))
    settled: Sampling | None = None

    def compiled(
        logits: Floats, sampling: Sampling, history: Sequence[int], position: int, /
    ) -> int:
        nonlocal settled
        if sampling is not settled:  # a frozen record, so the same one still says the same
            settled = None  # until all of it has been taken
            draw.settle(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                _least_weight(sampling),
                sampling.seed,
            )
            settled = sampling
        scores = np.ascontiguousarray(logits, np.float32)
        if sampling.repetition_penalty != 1:
            _check_finite(logits, position)
            scores = _penalised(scores, sampling, history)
        token = draw(scores, position)
        if token < 0:
            raise _not_finite(position)
        return token

    return compiled


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: the top 53 bits of Philox4x64's first word."""
    return _random_bits(seed, position) * 2.0**-53


def _random_bits(seed: int, position: int) -> int:
    return int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11


def _check_finite(logits: Floats, position: int) -> None:
    # the largest of numbers with a NaN among them is a NaN
    if not np.isfinite(logits.max()):
        raise _not_finite(position)


def _not_finite(position: int) -> EngineError:
    return EngineError(
        f"the logits of position {position} are not finite",
        "a weight or an activation overflowed, or the file is damaged",
        "compare the model file's checksum with its source, or use another model",
    )


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


WEIGHT_ONE = 1 << 40
"""The weight of the likeliest token; whole numbers, so that a sum has no order."""


_SILENT = -28.0
"""e to this power weighs less than 1, and so nothing."""


def _least_weight(sampling: Sampling) -> int:
    """The least weight that `min_p` keeps."""
    return int(sampling.min_p * WEIGHT_ONE)


def _weights(scores: Floats, sampling: Sampling) -> NDArray[np.int64]:
    """The weight of every id, 0 where a filter leaves it out."""
    # The largest becomes 0 first, so that no temperature, however small, overflows it.
    relative = scores.astype(np.float64) - float(scores.max())
    with np.errstate(over="ignore"):
        powers = (relative / sampling.temperature).astype(np.float32)
    weights = np.zeros(len(scores), np.int64)
    heard = powers > _SILENT
    weights[heard] = (exp(powers[heard]) * np.float32(WEIGHT_ONE)).astype(np.int64)
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        total = int(weights.sum())
        need = max(1, min(int(sampling.top_p * float(total)), total))
        kept = int(np.searchsorted(weights[order].cumsum(), need, "left")) + 1
        weights[order[kept:]] = 0
    weights[weights < _least_weight(sampling)] = 0
    return weights
