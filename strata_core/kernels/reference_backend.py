"""The backend record `reference`: float32 numpy on the CPU."""

from __future__ import annotations

from math import prod

from strata_core.builtin import REFERENCE
from strata_core.errors import Degradation
from strata_core.interfaces import (
    Backend,
    BackendContext,
    Capabilities,
    Executor,
    ExpertFiles,
    Limits,
    Progress,
    Source,
    Weights,
)
from strata_core.kernels.dequantise import dequantise
from strata_core.kernels.interpreter import Interpreter
from strata_core.kernels.kv import Floats
from strata_core.kernels.program import Program, Weight
from strata_core.kernels.reference import KERNELS


class ReferenceBackend:
    """Binds programs to the numpy kernels; dense weights are kept as float32."""

    @property
    def capabilities(self) -> Capabilities:
        """All types, KV as float32 or float16, not exact."""
        return REFERENCE

    def bind(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        progress: Progress,
    ) -> Executor:
        """Dequantise the dense weights and hand them to the interpreter."""
        dense: dict[Weight, Floats] = {}
        stored = {w: weights.raw(w.role, w.layer) for w in program.weights()}
        progress.start("dequantising dense weights", sum(d.nbytes for _, _, d in stored.values()))
        try:
            for weight, (type_name, shape, data) in stored.items():
                dense[weight] = dequantise(type_name, data, shape)
                progress.advance(prod(data.shape))
        finally:
            progress.done()
        return Interpreter(program, KERNELS, dense, experts, source, limits)

    def close(self) -> None:
        """Nothing is held outside executors."""


def build(context: BackendContext) -> Backend:
    """The backend of the record `reference`."""
    if context.options.get("threads") is not None:
        context.degrade(
            Degradation(
                what="--threads has no effect",
                why="the reference backend computes with numpy, which brings its own threads",
                cost="as many threads as numpy chooses",
                remedy="choose another backend with --backend",
            )
        )
    return ReferenceBackend()
