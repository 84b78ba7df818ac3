"""A program bound to the CPU: buffers, phases for each size of window, and the running of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from strata_core.errors import EngineError
from strata_core.interfaces import (
    ExpertFiles,
    Limits,
    Source,
    Weights,
    Window,
)
from strata_core.kernels.cpu.builder import Mode
from strata_core.kernels.cpu.frame import Frame, KvStore
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.lower import Lowering, mode_of
from strata_core.kernels.cpu.not_finite import not_finite
from strata_core.kernels.cpu.pool import Pool, Schedule
from strata_core.kernels.cpu.serving import Serving
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.storage import Storage
from strata_core.kernels.cpu.workspace import Dense, ExpertLayer, Workspace, served_words
from strata_core.kernels.exact_float import widen
from strata_core.kernels.program import Program, Weight
from strata_core.memory.address import address_of


class CpuExecutor:
    """Runs windows of at most `limits.tokens` tokens with the pool's threads. One thread only."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        library: Library,
        pool: Pool,
    ) -> None:
        self._program, self._limits = program, limits
        self._library, self._pool = library, pool
        self._files = experts
        self._storage = Storage()
        self._frame = Frame(self._storage, limits, program.rope, program.top_k)
        status = self._storage.zeros((1,), np.uint32)
        self._work = Workspace(self._storage, limits, program.top_k, status)
        self._weights = self._place(weights)
        self._experts = {
            layer: ExpertLayer(
                layout,
                self._storage.zeros((experts.count, 3), np.uint64),
                served_words(self._storage, experts),
            )
            for layer, layout in experts.layouts.items()
        }
        self._serving = Serving(source, self._experts)
        self._rounds: dict[Mode, Schedule] = {}
        self._slots: dict[int, KvStore] = {}

    # placing

    def _place(self, weights: Weights) -> dict[Weight, Dense]:
        """Dense weights stay where they are mapped; norms and biases become float32."""
        as_floats = float_weights(self._program)
        placed: dict[Weight, Dense] = {}
        for weight in self._program.weights():
            type_name, shape, data = weights.raw(weight.role, weight.layer)
            if weight in as_floats and type_name != "F32":
                data = widen(type_name, data).view(np.uint8)
                type_name = "F32"
            self._storage.keep(data)
            rows = shape if len(shape) > 1 else (1, *shape)
            placed[weight] = Dense(type_name, rows, address_of(data), data.nbytes)
        return placed

    def prepare(self, mode: Mode) -> Schedule:
        """The schedule of a mode, lowered and compiled at its first use."""
        if mode not in self._rounds:
            lowering = Lowering(
                self._program,
                mode,
                self._library,
                self._work,
                self._frame,
                self._weights,
                self._experts,
                self._pool.threads,
                self._serving,
            )
            self._rounds[mode] = Schedule.of(lowering.lower())
        return self._rounds[mode]

    # sequences

    def open_sequence(self) -> int:
        """Room for the keys and values of `limits.context` positions."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[slot] = KvStore.allocate(
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

    # running

    def run(self, window: Window) -> NDArray[np.float32]:
        """Compute one window; window and prompt kernels are the same here."""
        tokens, wanted = len(window.ids), len(window.logits_rows)
        if tokens > self._limits.tokens or wanted > self._limits.logits:
            raise EngineError(
                f"a window of {tokens} tokens and {wanted} logits rows is too big",
                f"the program is bound for {self._limits.tokens} and {self._limits.logits}",
                "this is an error in the engine; please report it",
            )
        schedule = self.prepare(mode_of(tokens, wanted))
        self._frame.fill(window, [self._slots[int(s)] for s in window.slots])
        self._work.status[0] = NOTHING_LATCHED
        self._serving.run(self._pool, schedule)
        if self._work.status[0] != NOTHING_LATCHED:
            raise not_finite(self._program, self._files, int(self._work.status[0]))
        logits: NDArray[np.float32] = self._work.buffer(self._program.logits)[:wanted]
        return logits

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Experts and bytes computed by the CPU lane; tokens that share an expert count each."""
        served = {n: int(layer.served[0]) for n, layer in self._experts.items()}
        nbytes = sum(count * self._experts[n].layout.nbytes for n, count in served.items())
        return {"cpu": {"experts": sum(served.values()), "bytes": nbytes}}

    def asked(self) -> Mapping[str, int]:
        """Experts that the source had to be asked for in rounds."""
        return self._serving.counters()

    def picks(self) -> Mapping[int, NDArray[np.int64]]:
        """How often each expert was chosen so far, by layer."""
        return {n: layer.served[2:].copy() for n, layer in self._experts.items()}

    def close(self) -> None:
        """Drop buffers and slots; the pool belongs to the backend."""
        self._serving.close()
        self._slots.clear()
        self._rounds.clear()


def float_weights(program: Program) -> set[Weight]:
    """Weights that kernels read as float32 whatever their type: norms and biases."""
    found = set()
    for op in program.ops:
        name = {"rms_norm": "weight", "linear": "bias"}.get(op.kernel)
        value = op.args.get(name) if name else None
        if isinstance(value, Weight):
            found.add(value)
    return found
