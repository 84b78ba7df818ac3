"""Dense weights on a device: in one allocation, norms and biases as float32; the embedding apart.

The embedding table may lie in page-locked host memory instead, where the device reads a row a token
over the link. A table that is also the output matrix is read whole, so it lies on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.cache.staging import Staging
from strata_core.errors import Degradation, Refused
from strata_core.interfaces import Progress, Weights
from strata_core.kernels.cpu.executor import float_weights
from strata_core.kernels.cpu.workspace import Dense
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.exact_float import widen
from strata_core.kernels.program import Program, Weight
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held

_log = logging.getLogger("strata.device")

Where = Literal["device", "pinned"]


@frozen(eq=False)
class Stored:
    """A dense weight as it is to lie: type, shape [rows, columns], bytes."""

    weight: Weight
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def at(self, address: int) -> Dense:
        """The weight at an address."""
        return Dense(self.type, self.shape, address, self.data.nbytes)


def read_weights(program: Program, weights: Weights) -> list[Stored]:
    """Every dense weight of a program, in order of first use; nothing is copied but norms."""
    as_floats = float_weights(program)
    found = []
    for weight in program.weights():
        type_name, shape, data = weights.raw(weight.role, weight.layer)
        if weight in as_floats and type_name != "F32":
            data = widen(type_name, data).view(np.uint8)
            type_name = "F32"
        rows = shape if len(shape) > 1 else (1, *shape)
        found.append(Stored(weight, type_name, rows, data))
    return found


def lone_embedding(program: Program) -> Weight | None:
    """The embedding table, where nothing else reads it; None where it is tied."""
    tables = {op.args["table"] for op in program.ops if op.kernel == "embed"}
    others = {v for op in program.ops if op.kernel != "embed" for v in op.args.values()}
    alone = [t for t in tables if isinstance(t, Weight) and t not in others]
    return alone[0] if len(alone) == 1 else None


def place_weights(
    held: Held, device: int, stored: Sequence[Stored], staging: Staging, progress: Progress
) -> dict[Weight, Dense]:
    """Put weights on a device, in one piece. Raises Refused; then nothing is held."""
    regions = Regions()
    for one in stored:
        regions.add(repr(one.weight), one.data.nbytes)
    if not stored:
        return {}
    regions.base = held.device(device, regions.nbytes, "the dense weights")
    placed = {}
    progress.start("placing dense weights", sum(one.data.nbytes for one in stored))
    try:
        for one in stored:
            address = regions.at(repr(one.weight))
            staging.put(device, address, one.data.reshape(-1))
            placed[one.weight] = one.at(address)
            progress.advance(one.data.nbytes)
    finally:
        staging.drain()
        progress.done()
    return placed


def place_embedding(
    held: Held,
    device: int,
    table: Stored,
    where: Where,
    staging: Staging,
    progress: Progress,
    degrade: Callable[[Degradation], None],
) -> Dense:
    """Put the token embedding where it is wished, or on the device where that is refused.

    The latter is told to `degrade`, and to the log.
    """
    if where == "pinned":
        pinned = _pin(held, device, table)
        if pinned is not None:
            return pinned
        mib = table.data.nbytes / 2**20
        _log.warning("native embedding: cannot pin %.0f MiB, kept in VRAM instead", mib)
        degrade(
            Degradation(
                what="the token embedding is kept in VRAM",
                why=f"the {mib:.2f} MiB that it takes could not be page-locked",
                cost="as much less room for experts",
                remedy="pin less elsewhere: `strata doctor` says what this machine's driver pins",
            )
        )
    return place_weights(held, device, [table], staging, progress)[table.weight]


def _pin(held: Held, device: int, table: Stored) -> Dense | None:
    try:
        address = held.pinned(table.data.nbytes, "the token embedding", small=False)
    except Refused:
        return None
    alias = held.runtime.alias(address, device)
    if alias is None:
        held.release(address)
        return None
    bytes_at(address, table.data.nbytes)[:] = table.data.reshape(-1)
    return table.at(alias)
