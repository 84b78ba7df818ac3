"""Phases while a program is lowered: what may run side by side, what together, and operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import numpy as np
from attrs import define, field

from strata_core.kernels.cpu.frame import Frame
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.pool import Phase, StepCall
from strata_core.kernels.cpu.serving import Serving
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.cpu.workspace import Dense, ExpertLayer, Workspace
from strata_core.kernels.program import Buffer, Op, Program, Weight

Mode = Literal["single", "window", "prompt"]
"""One token; up to `lower.WINDOW`; more."""


@define
class _Open:
    """A phase that is still being filled. `domain` is None for side by side."""

    domain: str | None
    steps: list[StepCall] = field(factory=list)
    read: set[str] = field(factory=set)
    written: set[str] = field(factory=set)
    closed: bool = False
    leader: bool = False
    unless: int = 0
    leaves_out: int = 0


class Builder:
    """The phases of one mode while they are filled, and the operands that steps are given."""

    def __init__(
        self,
        program: Program,
        mode: Mode,
        library: Library,
        workspace: Workspace,
        frame: Frame,
        weights: Mapping[Weight, Dense],
        experts: Mapping[int, ExpertLayer],
        threads: int,
        serving: Serving,
    ) -> None:
        """`serving`: who is asked for experts that have no address, where there may be some."""
        self.program, self.mode, self.library = program, mode, library
        self.work, self.frame = workspace, frame
        self.weights, self.experts = weights, experts
        self.threads, self.serving = threads, serving
        # prompts have enough tokens to share the transposing of weights
        self._layout = "tiles" if mode == "prompt" else "rows"
        self._quantise = Step("quantise_tiles" if mode == "prompt" else "quantise")
        self.phases: list[_Open] = []
        self._packed: dict[str, np.ndarray] = {}
        self._op = 0

    def _made(self) -> list[Phase]:
        return [
            Phase(
                tuple(p.steps),
                side_by_side=p.domain is None,
                leader=p.leader,
                unless=p.unless,
                leaves_out=p.leaves_out,
            )
            for p in self.phases
        ]

    # phases

    def _together(self, domain: str, step: Step, args: list[int], units: int) -> None:
        """Add a step whose units are the rows of `domain`."""
        last = self.phases[-1] if self.phases else None
        if last is None or last.closed or last.domain != domain:
            last = _Open(domain)
            self.phases.append(last)
        last.steps.append(self._call(step, args, units))

    def _side(self, step: Step, args: list[int], units: int, reads: str, writes: str) -> None:
        """Add a step that may run beside others which do not write what it reads."""
        last = self.phases[-1] if self.phases else None
        apart = last is None or last.closed or last.domain is not None
        if last is None or apart or reads in last.written or writes in last.read | last.written:
            last = _Open(None)
            self.phases.append(last)
        last.steps.append(self._call(step, args, units))
        last.read.add(reads)
        last.written.add(writes)

    def _end_phase(self) -> None:
        """Whatever comes next starts a phase of its own."""
        if self.phases:
            self.phases[-1].closed = True

    def _call(self, step: Step, args: list[int], units: int) -> StepCall:
        address = self.library.address(step)
        return StepCall(address, self.work.storage.words(args), units)

    # operands

    def _at(self, op: Op, name: str) -> int:
        return int(self.work.buffer(self._buffer(op, name)).ctypes.data)

    def _buffer(self, op: Op, name: str) -> Buffer:
        return cast("Buffer", op.args[name])

    def _int(self, op: Op, name: str) -> int:
        return int(cast("int", op.args[name] or 0))

    def _status(self) -> list[int]:
        return [int(self.work.status.ctypes.data), self._op]

    def _wrote(self, op: Op, *names: str) -> None:
        for name in names:
            self._packed.pop(self._buffer(op, name).name, None)

    def _rowwise(self, op: Op, step: str, args: list[int], out: str) -> None:
        rows = self._buffer(op, out).rows
        self._together(rows, Step(step), args, self.frame.count(rows))
        self._wrote(op, out)

    def _records(self, buffer: Buffer) -> np.ndarray:
        """The buffer's rows as records, quantised now unless that is done."""
        if buffer.name not in self._packed:
            rows = self.work.rows(buffer.rows)
            pack = self.work.scratch((buffer.name, self._layout), rows, buffer.width, "pack")
            x = self.work.buffer(buffer)
            args = [x.ctypes.data, pack.ctypes.data, buffer.width, pack.strides[0]]
            count = self.frame.count(buffer.rows)
            self._together(buffer.rows, self._quantise, [*args, *self._status()], count)
            self._packed[buffer.name] = pack
        return self._packed[buffer.name]

    def _products(self, name: str, *types: str) -> Step:
        """A step that multiplies rows, in this mode's layout where its types have one."""
        quantised = any(t in UNPACK for t in types)
        tiled = ("tiles",) if quantised and self._layout == "tiles" else ()
        return Step(name, (*types, *tiled))

    def _input(self, buffer: Buffer, type_name: str) -> np.ndarray:
        """The rows that a weight of a type multiplies: records, or the floats themselves."""
        return self._records(buffer) if type_name in UNPACK else self.work.buffer(buffer)
