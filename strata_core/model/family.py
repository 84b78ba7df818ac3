"""What a family file is: a name and a function that emits one layer."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from strata_core.checkpoint.hyper import Hyper
from strata_core.kernels.program import ProgramBuilder


@frozen
class Family:
    """An architecture family, named as the hub does; `layer` emits one layer's kernels."""

    name: str
    layer: Callable[[ProgramBuilder, Hyper, int], None]
