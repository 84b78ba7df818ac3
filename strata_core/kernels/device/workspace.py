"""What a device holds besides weights and experts: buffers, records, tables; one allocation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from strata_core.interfaces import BlobLayout, Limits
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.exchange import FRAME, Exchange, Shape, add_counts
from strata_core.kernels.device.layout import (
    CELL,
    ENTRY,
    PARTIAL_HEAD,
    STATUS_BYTES,
    inner_bytes,
    record_bytes,
)
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.exact import SPLIT
from strata_core.kernels.program import Buffer, Op, Program, Weight

Types = Mapping[Weight, str]
"""Stored type of each dense weight."""


@frozen(eq=False)
class Model:
    """What programs of one bound model are lowered from; `layouts` are those of its experts.

    `tokens` is the largest window, `routed` the layers with experts in program order.
    """

    program: Program
    layouts: Mapping[int, BlobLayout]
    experts: int
    types: Types
    limits: Limits
    shape: Shape

    @property
    def tokens(self) -> int:
        """Tokens of the largest window."""
        return self.shape.tokens

    @property
    def routed(self) -> tuple[int, ...]:
        """Layers with routed experts, in the order in which they run."""
        ops = [op for op in self.program.ops if op.kernel == "experts"]
        return tuple(whole(op, "layer") for op in ops)

    def rows(self, buffer: Buffer) -> int:
        """Most rows of a buffer."""
        return self.shape.entries if buffer.rows == "pick" else self.tokens

    def splits(self, window: int) -> int:
        """Most splits that attention of a sliding window (0: all positions) has for a token."""
        seen = min(window or self.limits.context, self.limits.context)
        return -(-seen // SPLIT) + (1 if window else 0)

    def quantised_inputs(self) -> Iterator[Buffer]:
        """Buffers whose rows some weight reads as records."""
        for op in self.program.ops:
            if op.kernel == "linear" and self.types[weight_of(op, "weight")] in UNPACK:
                yield buffer_of(op, "x")
            if op.kernel == "experts" and self.gate_type(op) in UNPACK:
                yield buffer_of(op, "x")

    def gate_type(self, op: Op) -> str:
        """Type of gate and up of an `experts` op."""
        return self.layouts[whole(op, "layer")].parts[0].type


def buffer_of(op: Op, name: str) -> Buffer:
    """A buffer argument."""
    value = op.args[name]
    assert isinstance(value, Buffer)
    return value


def weight_of(op: Op, name: str) -> Weight:
    """A weight argument."""
    value = op.args[name]
    assert isinstance(value, Weight)
    return value


def multiplies_next(program: Program, number: int, buffer: Buffer) -> Weight | None:
    """The weight of the first `linear` behind an op that multiplies a buffer's rows."""
    ops = program.ops[number + 1 :]
    found = (op for op in ops if op.kernel == "linear" and op.args["x"] == buffer)
    return next((weight_of(op, "weight") for op in found), None)


def whole(op: Op, name: str) -> int:
    """An integer argument; None is 0."""
    value = op.args[name]
    assert value is None or isinstance(value, int)
    return int(value or 0)


def main_regions(model: Model, exchange: Exchange) -> Regions:
    """The first device's workspace."""
    regions = Regions()
    # the frame's parts lie as on the host, from the start of the workspace
    for name in FRAME:
        regions.add(name, exchange.frame.size(name))
    add_counts(regions, model.shape)
    regions.add("result", STATUS_BYTES + 4 * model.tokens * model.program.vocabulary)
    for buffer in model.program.buffers:
        if buffer != model.program.logits:
            regions.add(f"buffer {buffer.name}", 4 * model.rows(buffer) * buffer.width)
    for buffer in model.quantised_inputs():
        regions.add(f"records {buffer.name}", model.rows(buffer) * record_bytes(buffer.width))
    for op in model.program.ops:
        if op.kernel == "attention":
            heads, dim = whole(op, "heads"), whole(op, "head_dim")
            rows = model.tokens * heads * model.splits(whole(op, "window"))
            regions.add("partials", 4 * rows * (PARTIAL_HEAD + dim))
    _expert_regions(regions, model)
    regions.add("share", 4 * (model.shape.entries + 1))
    return regions


def helper_regions(model: Model) -> Regions:
    """A helper's workspace."""
    regions = Regions()
    regions.add("status", STATUS_BYTES)
    regions.add("records", model.tokens * record_bytes(model.shape.inputs))
    _expert_regions(regions, model)
    return regions


def _expert_regions(regions: Regions, model: Model) -> None:
    regions.add("entries", ENTRY.itemsize * model.shape.entries)
    for layer in model.routed:
        gate = model.layouts[layer].parts[0]
        regions.add("inner", model.shape.entries * inner_bytes(gate.rows))
    # side by side, so that one copy brings a new table
    for layer in model.routed:
        regions.add(f"cells {layer}", CELL.itemsize * model.experts)


def cells_span(regions: Regions, model: Model) -> tuple[int, int]:
    """Where the first layer's cells begin, and the bytes to the end of the last one's."""
    first, last = (regions.at(f"cells {layer}") for layer in (model.routed[0], model.routed[-1]))
    return first, last + CELL.itemsize * model.experts - first


def cells_bytes(model: Model) -> int:
    """Bytes of the cells of all layers."""
    cells = Regions()
    for layer in model.routed:
        cells.add(f"cells {layer}", CELL.itemsize * model.experts)
    return cells.nbytes
