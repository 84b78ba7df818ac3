"""Cosines and sines of rotary position embedding, made once on the host in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strata_core.checkpoint.hyper import Rope


def rope_frequencies(rope: Rope) -> tuple[NDArray[np.float64], float]:
    """Angle per position of each pair, float64 [dim / 2], and the attention factor.

    Formulas: docs/arithmetic.md, section 7; YaRN after Peng et al. 2023.
    """
    pair = np.arange(rope.dim // 2, dtype=np.float64)
    plain = rope.theta ** (-2.0 * pair / rope.dim)
    if rope.scaling == "none":
        return plain, 1.0
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0

    def turns(beta: float) -> float:
        wavelengths = rope.original_context / (2.0 * math.pi * beta)
        return rope.dim * math.log(wavelengths) / (2.0 * math.log(rope.theta))

    low = max(math.floor(turns(rope.beta_fast)), 0)
    high = min(math.ceil(turns(rope.beta_slow)), rope.dim - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return (plain / rope.factor) * ramp + plain * (1.0 - ramp), factor


def rope_table(rope: Rope, positions: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), float32 [P, dim / 2] each, of the given positions, times the attention factor."""
    frequency, factor = rope_frequencies(rope)
    angle = np.asarray(positions, np.float64)[:, None] * frequency
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    return cos.astype(np.float32), sin.astype(np.float32)
