"""Mixtral: plain attention and routed experts whose weights are renormalised."""

from __future__ import annotations

from strata_core.checkpoint.hyper import Hyper
from strata_core.kernels.program import ProgramBuilder
from strata_core.model.family import Family
from strata_core.model.layers import attention, feed_forward


def layer(b: ProgramBuilder, h: Hyper, i: int) -> None:
    """One layer: attention, then the routed experts."""
    attention(b, h, i)
    feed_forward(b, h, i)


FAMILY = Family("mixtral", layer)
