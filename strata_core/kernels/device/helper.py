"""A helper: a further device that computes the experts in its own cache and returns their rows.

It reads activations and picks from the exchange and writes its rows there, through aliases; nothing
goes from device to device.
"""

from __future__ import annotations

from attrs import define, field, frozen

from strata_core.cache.slots import SlotPool
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.capture import capture, kernels_of
from strata_core.kernels.device.exchange import picks_of
from strata_core.kernels.device.layout import HELPER
from strata_core.kernels.device.segments import Copy, Fill, Item, Places
from strata_core.kernels.device.table import gate_up_warps, make_launch
from strata_core.kernels.device.workspace import Model, buffer_of, whole
from strata_core.kernels.program import Op
from strata_core.runtime import Runtime


@define(eq=False)
class Helper:
    """Helper `number` (1 to 3) on a device of the runtime; `places.weights` is empty."""

    runtime: Runtime
    number: int
    device: int
    stream: int
    pool: SlotPool
    places: Places
    _graphs: dict[tuple[int, int], int] = field(factory=dict, init=False)

    def layers(self) -> frozenset[int]:
        """Layers of which it holds an expert."""
        return frozenset(expert.layer for expert in self.pool.places)

    def graph(self, model: Model, layer: int, tokens: int, *, first: bool) -> int:
        """The graph of its part of a layer; `first`: it clears the status for the round."""
        if (layer, tokens) not in self._graphs:
            items = HelperLowering(model, self.places, self.number, tokens).lower(
                layer, first=first
            )
            self.runtime.load(self.device, kernels_of(items))
            self._graphs[layer, tokens] = capture(self.runtime, self.stream, items)
        return self._graphs[layer, tokens]

    def forget(self) -> None:
        """Free the graphs; none may be running."""
        while self._graphs:
            self.runtime.destroy_graph(self._graphs.popitem()[1])


@frozen
class HelperLowering:
    """A layer's launches on a helper, for a window of `tokens`."""

    model: Model
    places: Places
    number: int
    tokens: int

    def lower(self, layer: int, *, first: bool) -> list[Item]:
        """Claim its entries, compute them, return the status, say that the rows are there."""
        ordinal = self.model.routed.index(layer)
        number, op = next(
            (n, o)
            for n, o in enumerate(self.model.program.ops)
            if o.kernel == "experts" and whole(o, "layer") == layer
        )
        status = self.places.regions.at("status")
        returned = self.places.exchange.rest.at("helper status") + 64 * (self.number - 1)
        items: list[Item] = [Fill(status, 0xFF, 4)] if first else []
        items += self._compute(op, number, layer)
        items.append(Copy(returned, status, 4))
        done = self.places.seen_word(ordinal, self.number)
        told = self.places.seen_word(ordinal)
        items.append(make_launch("signal", word=done, value=told))
        return items

    def _compute(self, op: Op, number: int, layer: int) -> list[Item]:
        at, seen = self.places.regions.at, self.places.seen
        gate, up, down = self.model.layouts[layer].parts
        x, out = buffer_of(op, "x"), buffer_of(op, "out")
        mail = picks_of(self.places.exchange.shape, self.model.routed.index(layer))
        count = self.tokens * self.model.shape.top_k
        claim = make_launch(
            "claim",
            mail_picks=seen("picks", mail),
            mail_lanes=seen("lanes", mail),
            cells=at(f"cells {layer}"),
            entries=at("entries"),
            host_rows=seen("host_rows"),
            count=count,
            lane=HELPER + self.number - 1,
            outputs=out.width,
        )
        items: list[Item] = [claim]
        if gate.type in UNPACK:
            items.append(
                make_launch(
                    "quantise",
                    x=seen("x"),
                    records=at("records"),
                    status=at("status"),
                    rows=self.tokens,
                    width=x.width,
                    op=number,
                )
            )
        shared = {"entries": at("entries"), "inner": at("inner"), "count": count}
        gate_up = make_launch(
            "gate_up",
            (gate.type, up.type, down.type),
            x=at("records") if gate.type in UNPACK else seen("x"),
            status=at("status"),
            gate_stride=gate.nbytes // gate.rows,
            up_stride=up.nbytes // up.rows,
            top_k=self.model.shape.top_k,
            rows=gate.rows,
            columns=gate.columns,
            op=number,
            warps=gate_up_warps(gate.nbytes // gate.rows, up.nbytes // up.rows, self.places.room),
            **shared,
        )
        stride = down.nbytes // down.rows
        last = make_launch(
            "down", (down.type,), stride=stride, rows=down.rows, columns=down.columns, **shared
        )
        return [*items, gate_up, last]
