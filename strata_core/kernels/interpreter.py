"""The host executor that walks a program op by op; what the reference backend binds to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from strata_core.errors import EngineError
from strata_core.interfaces import ExpertFiles, Limits, Source, Window
from strata_core.kernels.experts import ExpertReader
from strata_core.kernels.kv import Floats, KeyValues
from strata_core.kernels.program import Argument, Buffer, Program, Weight
from strata_core.kernels.reference import Frame, Run
from strata_core.kernels.rope import angles


@frozen
class _Call:
    """One op with its function and with weights already looked up."""

    function: Callable[..., None]
    args: Mapping[str, Any]


class Interpreter:
    """Runs windows of at most `limits.tokens` tokens; buffers are made once. One thread only."""

    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, Callable[..., None]],
        weights: Mapping[Weight, Floats],
        files: ExpertFiles,
        source: Source,
        limits: Limits,
    ) -> None:
        self._program = program
        self._limits = limits
        self._calls = [
            _Call(kernels[op.kernel], {k: _resolve(v, weights) for k, v in op.args.items()})
            for op in program.ops
        ]
        most = {
            "token": limits.tokens,
            "pick": limits.tokens * program.top_k,
            "logits": limits.logits,
        }
        self._buffers = {
            b.name: np.zeros((most[b.rows], b.width), b.dtype) for b in program.buffers
        }
        self._experts = ExpertReader(files, source)
        self._slots: dict[int, KeyValues] = {}

    def open_sequence(self) -> int:
        """Room for the keys and values of `limits.context` positions."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[slot] = KeyValues.allocate(
            self._limits.kv_type,
            self._program.kv_layers,
            self._limits.context,
            self._program.kv_width,
        )
        return slot

    def close_sequence(self, slot: int) -> None:
        """Free a slot."""
        del self._slots[slot]

    def save(self, slot: int, length: int) -> object:
        """Keys and values of earlier positions never change, so the length is all there is."""
        del slot
        return length

    def restore(self, slot: int, snapshot: object) -> None:
        """Nothing to undo: later positions are overwritten before they are read again."""

    def run(self, window: Window) -> Floats:
        """Walk the program over one window."""
        count = {
            "token": len(window.ids),
            "pick": len(window.ids) * self._program.top_k,
            "logits": len(window.logits_rows),
        }
        if count["token"] > self._limits.tokens or count["logits"] > self._limits.logits:
            raise EngineError(
                f"a window of {count['token']} tokens and {count['logits']} logits rows is too big",
                f"the program is bound for {self._limits.tokens} and {self._limits.logits}",
                "this is an error in the engine; please report it",
            )
        views = {b.name: self._buffers[b.name][: count[b.rows]] for b in self._program.buffers}
        frame = self._frame(window)
        with np.errstate(over="ignore", invalid="ignore"):
            for call in self._calls:
                call.function(
                    frame,
                    **{
                        name: views[value.name] if isinstance(value, Buffer) else value
                        for name, value in call.args.items()
                    },
                )
        return views[self._program.logits.name]

    def _frame(self, window: Window) -> Frame:
        cos, sin = angles(self._program.rope, window.positions)
        edges = [0, *(np.flatnonzero(np.diff(window.slots)) + 1), len(window.slots)]
        runs = tuple(
            Run(self._slots[int(window.slots[a])], int(a), int(b))
            for a, b in itertools.pairwise(edges)
        )
        return Frame(
            ids=window.ids,
            positions=window.positions,
            logits_rows=window.logits_rows,
            runs=runs,
            cos=cos,
            sin=sin,
            experts=self._experts,
        )

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Everything is computed by the CPU lane here."""
        return {
            "cpu": {"experts": self._experts.served, "bytes": self._experts.served_bytes},
        }

    def close(self) -> None:
        """Drop buffers and slots."""
        self._slots.clear()
        self._buffers.clear()
        self._calls.clear()


def _resolve(value: Argument, weights: Mapping[Weight, Floats]) -> Any:
    return weights[value] if isinstance(value, Weight) else value
