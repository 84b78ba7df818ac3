"""Qwen2-MoE: biases on q, k and v, and an expert that every token asks, behind a gate."""

from __future__ import annotations

from strata_core.checkpoint.hyper import Hyper
from strata_core.kernels.program import ProgramBuilder
from strata_core.model.family import Family
from strata_core.model.layers import attention, feed_forward


def layer(b: ProgramBuilder, h: Hyper, i: int) -> None:
    """One layer: attention, then the routed experts and the shared one."""
    attention(b, h, i, bias=True)
    feed_forward(b, h, i)


FAMILY = Family("qwen2_moe", layer)
