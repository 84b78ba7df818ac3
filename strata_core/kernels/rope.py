"""Rope tables: the angles of each position, computed on the host in float64.

Sources: Su et al. 2021 (rotary embedding); Peng et al. 2023 (YaRN) for the stretched form, with
the attention factor 0.1 ln(factor) + 1 unless the model gives one.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import log, pi
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.checkpoint.hyper import Rope

Doubles = NDArray[np.float64]

_BLOCK = 64
"""Positions that are worked out together."""


@cache
def frequencies(rope: Rope) -> tuple[Doubles, float]:
    """Radians a position for each pair of a head, and the factor on cos and sin.

    The array is shared and not to be changed.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    plain = rope.theta**-exponents
    if rope.scaling == "none":
        return plain, 1.0
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0
    low = max(0.0, np.floor(_pair_of(rope, rope.beta_fast)))
    high = min(rope.dim - 1.0, np.ceil(_pair_of(rope, rope.beta_slow)))
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return plain * (1 - ramp) + plain / rope.factor * ramp, factor


def _pair_of(rope: Rope, turns: float) -> float:
    """The pair that makes `turns` full turns over the original context."""
    return rope.dim * log(rope.original_context / (turns * 2 * pi)) / (2 * log(rope.theta))


def angles(rope: Rope, positions: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [positions, dim / 2], rounded once from float64; not to be changed.

    Those of one position come from a block of neighbours, as the next one is asked for next.
    """
    if len(positions) == 1:
        block, row = divmod(int(positions[0]), _BLOCK)
        cos, sin = _block(rope, block)
        return cos[row : row + 1], sin[row : row + 1]
    return _angles(rope, positions)


@define(eq=False)
class Turns:
    """`angles` of one position after the other, as the bytes of a row of each. Used by one thread.

    The rows of a block are kept as they are written: the next position is asked for next.
    """

    rope: Rope
    _number: int = field(default=-1, init=False)
    _rows: list[tuple[bytes, bytes]] = field(factory=list, init=False)

    def at(self, position: int) -> tuple[bytes, bytes]:
        """cos and sin, float32 [dim / 2] each."""
        number, row = divmod(position, _BLOCK)
        if number != self._number:
            cos, sin = _block(self.rope, number)
            self._rows = [(c.tobytes(), s.tobytes()) for c, s in zip(cos, sin, strict=True)]
            self._number = number
        return self._rows[row]


@lru_cache(maxsize=64)
def _block(rope: Rope, number: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return _angles(rope, np.arange(number * _BLOCK, (number + 1) * _BLOCK))


def _angles(rope: Rope, positions: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    radians, factor = frequencies(rope)
    turned = np.asarray(positions, np.float64)[:, None] * radians[None, :]
    return (
        (np.cos(turned) * factor).astype(np.float32),
        (np.sin(turned) * factor).astype(np.float32),
    )
