"""Qwen3-MoE: q and k normed head by head, routed experts, dense layers in between."""

from __future__ import annotations

from strata_core.checkpoint.hyper import Hyper
from strata_core.kernels.program import ProgramBuilder
from strata_core.model.family import Family
from strata_core.model.layers import attention, feed_forward


def layer(b: ProgramBuilder, h: Hyper, i: int) -> None:
    """One layer: attention, then the routed or the dense feed-forward."""
    attention(b, h, i, qk_norm="head")
    feed_forward(b, h, i)


FAMILY = Family("qwen3_moe", layer)
