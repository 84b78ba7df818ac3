"""The self-test of the CPU's lane: the very steps that a program uses, on golden rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.kernels.cpu.elementwise import Layout
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.linear import CHUNK, GROUP_FIELDS
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.storage import Storage
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.self_test import (
    COLUMNS,
    ROWS,
    TOKENS,
    Computed,
    Golden,
    LaneCheck,
    check_lane,
    golden,
    golden_inner,
)

TESTED = ("linear", "gate_up", "down")
"""Steps that multiply weights; the others have no variants by type that could be mixed up."""


def check_cpu_lane(library: Library, pool: Pool, steps: Iterable[Step]) -> LaneCheck:
    """Run those of `steps` that multiply weights on the pool's threads; one round of it."""
    test = _Test(library)
    for step in sorted(set(steps)):
        if step.name in TESTED:
            test.add(step)
    pool.run(Schedule.of(test.phases()))
    return check_lane("cpu", test.computed)


@frozen(eq=False)
class _Rows:
    """Input rows as a step takes them: the address of the list of their addresses."""

    array: NDArray[Any]
    addresses: int


class _Test:
    """Lays out one round: records first, then every step on a product of its own."""

    def __init__(self, library: Library) -> None:
        self.library, self.store = library, Storage()
        self.status = self.store.zeros((1,), np.uint32)
        self.status[0] = NOTHING_LATCHED
        self.one, self.tokens = self.store.words([1]), self.store.words([TOKENS])
        self.computed: list[Computed] = []
        self.quantising: list[StepCall] = []
        self.multiplying: list[StepCall] = []
        self._inputs: dict[str, _Rows] = {}

    def phases(self) -> list[Phase]:
        """What to run."""
        both = (self.quantising, self.multiplying)
        return [Phase(tuple(steps), side_by_side=True) for steps in both if steps]

    def add(self, step: Step) -> None:
        """Test a step; what it computes is compared after the round."""
        types = [str(p) for p in step.parameters]
        layout: Layout = "tiles" if types[-1] == "tiles" else "rows"
        name = " ".join((step.name, *types))
        if step.name == "gate_up":
            self._gate_up(step, name, types, layout)
            return
        made = golden(types[0])
        out = self.store.zeros((TOKENS, ROWS), np.float32)
        xs, ys = self._input(types[0], layout), self.store.addresses(out)
        if step.name == "linear":
            weight = self._address(made.weight)
            sizes = [len(made.weight) // ROWS, self._length(types[0])]
            args = [weight, *sizes, self.tokens, xs, ys, ROWS, ROWS, 0]
        else:
            args = self._expert((made, made, made), xs, ys, made.type)
        self._call(step, args)
        self.computed.append(Computed(name, out, made.out))

    def _gate_up(self, step: Step, name: str, types: list[str], layout: Layout) -> None:
        gate, up, down = (golden(t) for t in types[:3])
        expected = golden_inner(gate.type, up.type)
        out: NDArray[Any]
        wanted: NDArray[Any]
        if down.type in UNPACK:
            out, wanted = (self.store.packs(TOKENS, ROWS) for _ in range(2))
            self._quantise(expected, wanted, layout)
        else:
            out, wanted = self.store.zeros((TOKENS, ROWS), np.float32), expected
        xs = self._input(gate.type, layout)
        self._call(step, self._expert((gate, up, down), xs, self.store.addresses(out), gate.type))
        self.computed.append(Computed(name, out, wanted))

    def _expert(self, parts: tuple[Golden, ...], xs: int, ys: int, first: str) -> list[int]:
        """The arguments of a step over one expert that every token picked."""
        matrices = [self._address(part.weight) for part in parts]
        groups = self.store.zeros((2, GROUP_FIELDS), np.int64)
        groups[0, :3], groups[1, 3] = matrices, TOKENS
        strides = [len(part.weight) // ROWS for part in parts[:2]]
        status = [int(self.status.ctypes.data), 0]
        return [
            int(groups.ctypes.data),
            xs,
            ys,
            *strides,
            self._length(first),
            ROWS,
            CHUNK,
            *status,
        ]

    def _length(self, type_name: str) -> int:
        return COLUMNS // 32 if type_name in UNPACK else COLUMNS

    def _address(self, array: NDArray[Any]) -> int:
        self.store.keep(array)
        return int(array.ctypes.data)

    def _input(self, type_name: str, layout: Layout) -> int:
        """Where the golden activations lie as a weight of the type takes them."""
        kind = layout if type_name in UNPACK else "float32"
        if kind not in self._inputs:
            x = golden(type_name).x
            array: NDArray[Any] = x
            if kind != "float32":
                array = self.store.packs(TOKENS, COLUMNS)
                self._quantise(x, array, layout)
            self.store.keep(array)
            self._inputs[kind] = _Rows(array, self.store.addresses(array))
        return self._inputs[kind].addresses

    def _quantise(self, floats: NDArray[Any], pack: NDArray[Any], layout: Layout) -> None:
        step = Step("quantise" if layout == "rows" else "quantise_tiles")
        args = [self._address(floats), int(pack.ctypes.data), floats.shape[1], pack.strides[0]]
        address = self.library.address(step)
        block = self.store.words([*args, int(self.status.ctypes.data), 0])
        self.quantising.append(StepCall(address, block, self.tokens))

    def _call(self, step: Step, args: list[int]) -> None:
        address = self.library.address(step)
        self.multiplying.append(StepCall(address, self.store.words(args), self.one))
