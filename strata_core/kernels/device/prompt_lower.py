"""Chunks of prompts as launches, and what they need of a device and of page-locked memory.

A chunk is a list of segments, each ending where the picks of a routed layer are grouped; the waves
of that layer's experts come between. The head follows for the rows whose logits are wanted.
"""

from __future__ import annotations

from attrs import evolve

from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.exchange import FRAME, Exchange, Shape, frame_regions
from strata_core.kernels.device.fuse import fuse, start_early
from strata_core.kernels.device.layout import (
    STATUS_BYTES,
    WAVE,
    inner_bytes,
    record_bytes,
)
from strata_core.kernels.device.lower import Lowering, unsupported
from strata_core.kernels.device.prompt_table import (
    MATRIX_NAMES,
    attending,
    multiplying,
    spread_of,
    within,
)
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.device.segments import Copy, Fill, Item, Mode, Places, Segment
from strata_core.kernels.device.table import make_launch
from strata_core.kernels.device.workspace import Model, buffer_of, weight_of, whole
from strata_core.kernels.fit import check_experts, check_heads
from strata_core.kernels.program import Op, Weight
from strata_core.runtime import KernelKey

HEAD_ROWS = 8
"""Rows of logits that are computed at once behind a chunk."""


def own_order(model: Model, *, matrix: bool) -> bool:
    """Whether a prompt's bits are others than a window's: some kernel has an order of its own.

    `matrix`: whether the device has matrix units.
    """
    heads = (whole(op, "head_dim") for op in model.program.ops if op.kernel == "attention")
    kv = model.limits.kv_type
    names = {attending(kv, dim, matrix=matrix) for dim in heads}
    names |= {key.name for key in multiplying_kernels(model, matrix=matrix)}
    return not names.isdisjoint(MATRIX_NAMES)


def multiplying_kernels(model: Model, *, matrix: bool) -> set[KernelKey]:
    """The kernels of chunks that multiply weights."""
    found = set()

    def add(name: str, types: tuple[str, ...]) -> None:
        found.add(KernelKey(multiplying(name, types[:2], matrix=matrix), types))

    for op in model.program.ops:
        if op.kernel == "linear" and buffer_of(op, "x").rows != "logits":
            add("prompt_linear", (model.types[weight_of(op, "weight")],))
    for layer in model.routed:
        gate, up, down = (part.type for part in model.layouts[layer].parts)
        add("prompt_gate_up", (gate, up, down))
        add("prompt_down", (down,))
    return found


def prompt_model(model: Model, tokens: int) -> Model:
    """The same model in chunks of at most `tokens`."""
    return evolve(model, shape=Shape.of(model.program, tokens))


def prompt_regions(model: Model) -> Regions:
    """What a chunk takes of the device, beside weights and experts."""
    frame, regions = frame_regions(model.shape), Regions()
    # the frame's parts lie as on the host, from the start of the workspace
    for name in FRAME:
        regions.add(name, frame.size(name))
    regions.add("result", STATUS_BYTES + 4 * HEAD_ROWS * model.program.vocabulary)
    for buffer in model.program.buffers:
        if buffer != model.program.logits:
            rows = HEAD_ROWS if buffer.rows == "logits" else model.rows(buffer)
            regions.add(f"buffer {buffer.name}", 4 * rows * buffer.width)
    for buffer in model.quantised_inputs():
        rows = HEAD_ROWS if buffer.rows == "logits" else model.rows(buffer)
        regions.add(f"records {buffer.name}", rows * record_bytes(buffer.width))
    for layer in model.routed:
        gate = model.layouts[layer].parts[0]
        regions.add("inner", model.shape.entries * inner_bytes(gate.rows))
    regions.add("starts", 4 * (model.experts + 1))
    regions.add("order", 4 * model.shape.entries)
    regions.add("waves", WAVE.itemsize * model.experts * len(model.routed))
    return regions


def prompt_exchange(model: Model) -> Exchange:
    """What host and device exchange of a chunk, without its place.

    "waves": WAVE [routed, experts]; "starts": int32 [routed, experts + 1]; "result": status and
    HEAD_ROWS rows of logits.
    """
    rest = Regions()
    rest.add("waves", WAVE.itemsize * model.experts * len(model.routed))
    rest.add("starts", 4 * (model.experts + 1) * len(model.routed))
    rest.add("result", STATUS_BYTES + 4 * HEAD_ROWS * model.program.vocabulary)
    return Exchange(model.shape, 0, frame_regions(model.shape), rest)


class PromptLowering(Lowering):
    """Turns the program into the segments of a chunk of `tokens`, by the kernels of prompts."""

    def __init__(self, model: Model, places: Places, tokens: int, wanted: int = 0) -> None:
        super().__init__(model, places, Mode(tokens, wanted, 1), frozenset())
        self._first = 0

    def chunk(self) -> list[Segment]:
        """Everything up to the last layer, the frame's copy first."""
        frame = self.places.exchange.frame
        self._add(Copy(self._region("round"), frame.at("round"), frame.nbytes))
        self._add(Fill(self._status(), 0xFF, 4))
        self._lower(head=False)
        return [fuse(segment) for segment in self.segments]

    def head(self, first: int) -> list[Item]:
        """The logits of the rows from the `first` wanted one on, and their way to the host."""
        self._first = first
        self._lower(head=True)
        nbytes = STATUS_BYTES + 4 * self.mode.wanted * self.model.program.vocabulary
        self._add(Copy(self.places.exchange.rest.at("result"), self._status(), nbytes))
        return self.segments[0].items

    def wave(self, layer: int, begin: int, count: int) -> list[Item]:
        """`count` experts of a layer, from the `begin`-th line of its table of waves on."""
        op = next(
            op
            for op in self.model.program.ops
            if op.kernel == "experts" and whole(op, "layer") == layer
        )
        self._op = self.model.program.ops.index(op)
        gate, up, down = self.model.layouts[layer].parts
        x, out = buffer_of(op, "x"), buffer_of(op, "out")
        lines = self.model.experts * self.model.routed.index(layer) + begin
        shared = {
            "wave": self._region("waves") + WAVE.itemsize * lines,
            "starts": self._region("starts"),
            "order": self._region("order"),
            "inner": self._region("inner"),
            "experts": count,
        }
        source = f"records {x.name}" if gate.type in UNPACK else f"buffer {x.name}"
        first, second = (
            multiplying(name, types, matrix=self.places.matrix)
            for name, types in (
                ("prompt_gate_up", (gate.type, up.type)),
                ("prompt_down", (down.type,)),
            )
        )
        inner = make_launch(
            first,
            (gate.type, up.type, down.type),
            spread=self._spread(first),
            x=self._region(source),
            status=self._status(),
            gate_stride=gate.nbytes // gate.rows,
            up_stride=up.nbytes // up.rows,
            top_k=self.model.shape.top_k,
            rows=gate.rows,
            columns=gate.columns,
            op=self._op,
            **shared,
        )
        last = make_launch(
            second,
            (down.type,),
            spread=self._spread(second),
            out=self._at(out),
            stride=down.nbytes // down.rows,
            rows=down.rows,
            columns=down.columns,
            **shared,
        )
        return start_early([within(launch, self.places.room) for launch in (inner, last)])

    def _spread(self, name: str) -> int:
        entries = self.mode.tokens * self.model.shape.top_k
        return spread_of(name, self.mode.tokens, entries, self.model.experts)

    def table(self, layer: int | None) -> Copy:
        """The copy of a layer's table of waves, or (None) of all of them."""
        target, source = self._region("waves"), self.places.exchange.rest.at("waves")
        each = WAVE.itemsize * self.model.experts
        if layer is None:
            return Copy(target, source, each * len(self.model.routed))
        offset = each * self.model.routed.index(layer)
        return Copy(target + offset, source + offset, each)

    def _lower(self, *, head: bool) -> None:
        ops = self.model.program.ops
        split = next(number for number, op in enumerate(ops) if op.kernel == "gather")
        for number, op in enumerate(ops):
            if (number >= split) == head:
                self._op = number
                getattr(self, f"_op_{op.kernel}")(op)

    # kernels that differ from a window's

    def _op_linear(self, op: Op) -> None:
        x, out, bias = buffer_of(op, "x"), buffer_of(op, "out"), op.args["bias"]
        if x.rows == "logits":
            super()._op_linear(op)
            return
        weight = self.places.weights[weight_of(op, "weight")]
        self._launch(
            multiplying("prompt_linear", (weight.type,), matrix=self.places.matrix),
            weight.type,
            x=self._input(x, weight.type),
            weight=weight.address,
            out=self._at(out),
            bias=self.places.weights[bias].address if isinstance(bias, Weight) else 0,
            stride=weight.stride,
            tokens=self._rows(x),
            rows=weight.shape[0],
            columns=weight.shape[1],
        )
        self._wrote(out)

    def _op_attention(self, op: Op) -> None:
        out = buffer_of(op, "out")
        heads, kv_heads, dim = (whole(op, n) for n in ("heads", "kv_heads", "head_dim"))
        kv_type = self.model.limits.kv_type
        check_heads(heads // kv_heads, dim, kv_type, unsupported)
        self._launch(
            attending(kv_type, dim, matrix=self.places.matrix),
            kv_type,
            dim,
            q=self._at(buffer_of(op, "q")),
            out=self._at(out),
            positions=self._region("positions"),
            places=self._region("places"),
            layer_offset=whole(op, "layer") * self.model.limits.context,
            tokens=self.mode.tokens,
            width=kv_heads * dim,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            window=whole(op, "window"),
        )
        self._wrote(out)

    def _op_gather(self, op: Op) -> None:
        x, out = buffer_of(op, "x"), buffer_of(op, "out")
        index = self._region("logits_rows") + 4 * self._first
        at = {"x": self._at(x), "index": index, "out": self._at(out)}
        self._launch("gather", rows=self.mode.wanted, width=out.width, **at)
        self._wrote(out)

    def _op_experts(self, op: Op) -> None:
        layer, x, out = whole(op, "layer"), buffer_of(op, "x"), buffer_of(op, "out")
        check_experts(layer, self.model.layouts[layer], unsupported)
        self._input(x, self.model.layouts[layer].parts[0].type)
        starts = self._region("starts")
        self._launch(
            "prompt_group",
            picks=self._at(buffer_of(op, "picks")),
            starts=starts,
            order=self._region("order"),
            count=self.mode.tokens * self.model.shape.top_k,
            experts=self.model.experts,
        )
        each = 4 * (self.model.experts + 1)
        told = self.places.exchange.rest.at("starts") + each * self.model.routed.index(layer)
        self._add(Copy(told, starts, each))
        self._wrote(out)
        self.segments[-1].layer = layer
        self.segments.append(Segment())

    def _op_combine(self, op: Op) -> None:
        x = buffer_of(op, "x")
        self._launch(
            "prompt_combine",
            x=self._at(x),
            rows=self._at(buffer_of(op, "rows")),
            weights=self._at(buffer_of(op, "weights")),
            tokens=self.mode.tokens,
            width=x.width,
            top_k=whole(op, "top_k"),
        )
        self._wrote(x)
