"""From a model's path to a running engine: the start-up phases, in order.

`prepare` reads, selects and plans without allocating anything; `strata plan` stops there. `start`
builds what was planned. A failure in any phase undoes the phases before it.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

from attrs import frozen

from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings
from strata_core.engine.loop import Engine
from strata_core.errors import DoesNotFit, UsageError
from strata_core.interfaces import (
    AllocatorContext,
    BackendContext,
    Capabilities,
    Executor,
    Limits,
    Progress,
    SourceContext,
)
from strata_core.kernels.kv import kv_bytes
from strata_core.kernels.program import Program
from strata_core.machine import Machine
from strata_core.model.build import build_program
from strata_core.plan.explain import does_not_fit
from strata_core.plan.plan import Plan, PlanRequest, Sizes, make_plan

WINDOW_TOKENS = 512
"""Most tokens of one window."""

WINDOW_LOGITS = 64
"""Most logits rows of one window."""
