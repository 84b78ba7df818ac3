"""From a program to launches: one list of segments for each size of window.

A segment ends where a routed layer's mail is out: what follows begins with the combine, which needs
the rows of all lanes. Where nothing goes to other lanes there is one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np

from strata_core.errors import CheckpointError
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.exchange import counts_of, picks_of
from strata_core.kernels.device.layout import LATE, LINE_BYTES, STATUS_BYTES
from strata_core.kernels.device.prompt_table import within
from strata_core.kernels.device.segments import Copy, Fill, Item, Mode, Places, Segment
from strata_core.kernels.device.table import gate_up_warps, make_launch
from strata_core.kernels.device.workspace import Model, buffer_of, multiplies_next, weight_of, whole
from strata_core.kernels.fit import check_experts, check_heads, check_router
from strata_core.kernels.program import Buffer, Op, Weight


class Lowering:
    """Turns the program into the segments of one mode."""

    def __init__(
        self,
        model: Model,
        places: Places,
        mode: Mode,
        shared: AbstractSet[int],
        bound: int | None = None,
    ) -> None:
        """`shared`: routed layers in which other lanes may take part; each sends its mail.

        `bound`: ticks that the combine of such a layer waits for the answer; None: it is launched
        when all have answered.
        """
        self.model, self.places, self.mode, self.shared = model, places, mode, shared
        self._bound = bound
        self.segments = [Segment()]
        self._packed: set[str] = set()
        self._op = 0
        self._ordinal = 0
        self._answered = False

    def lower(self) -> list[Segment]:
        """All segments in order."""
        self._begin()
        for number, op in enumerate(self.model.program.ops):
            self._op = number
            handler: Callable[[Op], None] = getattr(self, f"_op_{op.kernel}")
            handler(op)
        self._end()
        return self.segments

    def _begin(self) -> None:
        frame = self.places.exchange.frame
        base = self.places.regions.at("round")
        self._add(Copy(base, frame.at("round"), frame.nbytes))
        self._add(Fill(self.places.regions.at("result"), 0xFF, LATE + 4))

    def _end(self) -> None:
        counts, result = (self._region(name) for name in ("counts", "result"))
        logits = 4 * self.mode.wanted * self.model.program.vocabulary
        nbytes = result - counts + STATUS_BYTES + logits
        self._add(Copy(self.places.exchange.rest.at("counts"), counts, nbytes))
        end = self.places.seen_word(self.model.shape.layers)
        self._launch("signal", word=end, value=self.places.regions.at("round"))

    # parts

    def _add(self, item: Item) -> None:
        self.segments[-1].items.append(item)

    def _launch(self, name: str, *parameters: str | int, **values: float) -> None:
        self._add(within(make_launch(name, parameters, **values), self.places.room))

    def _rows(self, buffer: Buffer) -> int:
        counts = {"token": self.mode.tokens, "logits": self.mode.wanted}
        return counts.get(buffer.rows, self.mode.tokens * self.model.shape.top_k)

    def _at(self, buffer: Buffer) -> int:
        if buffer == self.model.program.logits:
            return self.places.regions.at("result") + STATUS_BYTES
        return self.places.regions.at(f"buffer {buffer.name}")

    def _region(self, name: str) -> int:
        return self.places.regions.at(name)

    def _status(self) -> int:
        return self._region("result")

    def _wrote(self, *buffers: Buffer) -> None:
        self._packed -= {b.name for b in buffers}

    def _input(self, buffer: Buffer, type_name: str) -> int:
        """The rows that a weight of a type multiplies; made into records where it wants those."""
        if type_name not in UNPACK:
            return self._at(buffer)
        records = self._region(f"records {buffer.name}")
        if buffer.name not in self._packed:
            self._launch(
                "quantise",
                x=self._at(buffer),
                records=records,
                status=self._status(),
                rows=self._rows(buffer),
                width=buffer.width,
                op=self._op,
            )
            self._packed.add(buffer.name)
        return records

    def _pack_ahead(self, buffer: Buffer) -> None:
        """Records right behind the norm, in the name of the op that is the first to want them."""
        norm = self._op
        for number, op in enumerate(self.model.program.ops[norm + 1 :], norm + 1):
            type_name = self._type_read(op, buffer)
            if type_name in UNPACK:
                self._op = number
                self._input(buffer, type_name)
                break
            in_place = op.kernel in ("rope", "add", "gate_add", "combine")
            if buffer == op.args.get("out") or (in_place and buffer == op.args.get("x")):
                break
        self._op = norm

    def _type_read(self, op: Op, buffer: Buffer) -> str:
        """The type of the weights that an op multiplies a buffer's rows with; or nothing."""
        if op.args.get("x") != buffer:
            return ""
        if op.kernel == "linear":
            return self.places.weights[weight_of(op, "weight")].type
        return self.model.gate_type(op) if op.kernel == "experts" else ""

    # kernels

    def _op_embed(self, op: Op) -> None:
        table, out = self.places.weights[weight_of(op, "table")], buffer_of(op, "out")
        self._launch(
            "embed",
            table.type,
            ids=self._region("ids"),
            table=table.address,
            out=self._at(out),
            stride=table.stride,
            tokens=self.mode.tokens,
            width=out.width,
        )
        self._wrote(out)

    def _op_rms_norm(self, op: Op) -> None:
        x, out, dim = buffer_of(op, "x"), buffer_of(op, "out"), whole(op, "dim")
        if not self._rows(x):
            return
        eps = op.args["eps"]
        assert isinstance(eps, int | float)
        self._launch(
            "rms_norm",
            x=self._at(x),
            out=self._at(out),
            weight=self.places.weights[weight_of(op, "weight")].address,
            rows=self._rows(x),
            runs=x.width // dim,
            dim=dim,
            eps=float(np.float32(eps)),
        )
        self._wrote(out)
        self._pack_ahead(out)

    def _op_linear(self, op: Op) -> None:
        weight = self.places.weights[weight_of(op, "weight")]
        x, out, bias = buffer_of(op, "x"), buffer_of(op, "out"), op.args["bias"]
        if not self._rows(x):
            return
        self._launch(
            "linear",
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

    def _op_rope(self, op: Op) -> None:
        x = buffer_of(op, "x")
        self._launch(
            "rope",
            x=self._at(x),
            cos=self._region("cos"),
            sin=self._region("sin"),
            tokens=self.mode.tokens,
            heads=whole(op, "heads"),
            head_dim=whole(op, "head_dim"),
            half=self.model.shape.half,
        )
        self._wrote(x)

    def _op_kv_append(self, op: Op) -> None:
        k, v = buffer_of(op, "k"), buffer_of(op, "v")
        self._launch(
            "kv_append",
            self.model.limits.kv_type,
            k=self._at(k),
            v=self._at(v),
            positions=self._region("positions"),
            places=self._region("places"),
            status=self._status(),
            layer_offset=whole(op, "layer") * self.model.limits.context,
            tokens=self.mode.tokens,
            width=k.width,
            op=self._op,
        )

    def _op_attention(self, op: Op) -> None:
        out = buffer_of(op, "out")
        heads, kv_heads = whole(op, "heads"), whole(op, "kv_heads")
        dim, window = whole(op, "head_dim"), whole(op, "window")
        kv_type = self.model.limits.kv_type
        check_heads(heads // kv_heads, dim, kv_type, unsupported)
        splits = min(self.mode.splits, self.model.splits(window))
        shared = {
            "partials": self._region("partials"),
            "positions": self._region("positions"),
            "tokens": self.mode.tokens,
            "window": window,
            "splits": splits,
        }
        self._launch(
            "attention",
            kv_type,
            dim,
            q=self._at(buffer_of(op, "q")),
            places=self._region("places"),
            layer_offset=whole(op, "layer") * self.model.limits.context,
            width=kv_heads * dim,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            **self._ahead(buffer_of(op, "out")),
            **shared,
        )
        self._launch("merge", dim, out=self._at(out), heads=heads, **shared)
        self._wrote(out)

    def _ahead(self, buffer: Buffer) -> dict[str, int]:
        """The weights that are the next to multiply a buffer: attention leaves memory idle."""
        weight = multiplies_next(self.model.program, self._op, buffer)
        found = self.places.weights[weight] if weight else None
        lines = found.nbytes // LINE_BYTES if found else 0
        return {"ahead": found.address if found else 0, "ahead_lines": lines}

    def _op_add(self, op: Op) -> None:
        x, y = buffer_of(op, "x"), self._at(buffer_of(op, "y"))
        self._launch("add", x=self._at(x), y=y, rows=self._rows(x), width=x.width)
        self._wrote(x)

    def _op_silu_mul(self, op: Op) -> None:
        gate, up, out = (buffer_of(op, n) for n in ("gate", "up", "out"))
        at = {"gate": self._at(gate), "up": self._at(up), "out": self._at(out)}
        self._launch("silu_mul", rows=self._rows(out), width=out.width, **at)
        self._wrote(out)

    def _op_gate_add(self, op: Op) -> None:
        x, y, gate = (buffer_of(op, n) for n in ("x", "y", "gate"))
        at = {"x": self._at(x), "y": self._at(y), "gate": self._at(gate)}
        self._launch("gate_add", rows=self._rows(x), width=x.width, **at)
        self._wrote(x)

    def _op_gather(self, op: Op) -> None:
        x, out = buffer_of(op, "x"), buffer_of(op, "out")
        if self.mode.wanted:
            at = {"x": self._at(x), "index": self._region("logits_rows"), "out": self._at(out)}
            self._launch("gather", rows=self.mode.wanted, width=out.width, **at)
        self._wrote(out)

    def _op_route(self, op: Op) -> None:
        logits = buffer_of(op, "logits")
        check_router(logits.width, unsupported)
        self._launch(
            "route",
            logits=self._at(logits),
            picks=self._at(buffer_of(op, "picks")),
            weights=self._at(buffer_of(op, "weights")),
            status=self._status(),
            tokens=self.mode.tokens,
            experts=logits.width,
            top_k=whole(op, "top_k"),
            renormalise=int(bool(op.args["renormalise"])),
            op=self._op,
        )

    def _op_experts(self, op: Op) -> None:
        layer, x, out = whole(op, "layer"), buffer_of(op, "x"), buffer_of(op, "out")
        gate, up, down = self.model.layouts[layer].parts
        check_experts(layer, self.model.layouts[layer], unsupported)
        self._assign(op, layer, x, out)
        source = self._input(x, gate.type)
        count = self.mode.tokens * self.model.shape.top_k
        shared = {"entries": self._region("entries"), "inner": self._region("inner")}
        self._launch(
            "gate_up",
            gate.type,
            up.type,
            down.type,
            x=source,
            status=self._status(),
            gate_stride=gate.nbytes // gate.rows,
            up_stride=up.nbytes // up.rows,
            count=count,
            top_k=self.model.shape.top_k,
            rows=gate.rows,
            columns=gate.columns,
            op=self._op,
            warps=gate_up_warps(gate.nbytes // gate.rows, up.nbytes // up.rows, self.places.room),
            **shared,
        )
        self._launch(
            "down",
            down.type,
            stride=down.nbytes // down.rows,
            count=count,
            rows=down.rows,
            columns=down.columns,
            **shared,
        )
        self._wrote(out)
        if layer in self.shared:
            self.segments[-1].layer = layer
            self.segments.append(Segment())

    def _assign(self, op: Op, layer: int, x: Buffer, out: Buffer) -> None:
        seen, mine = self.places.seen, picks_of(self.places.exchange.shape, self._ordinal)
        mail = {
            "mail_x": seen("x"),
            "mail_picks": seen("picks", mine),
            "mail_lanes": seen("lanes", mine),
            "mail_host": seen("host", mine),
            "mail_word": self.places.seen_word(self._ordinal) if layer in self.shared else 0,
        }
        counts = self._region("counts") + counts_of(self._ordinal)
        self._answered = layer in self.shared and self._bound is not None
        self._ordinal += 1
        self._launch(
            "assign",
            picks=self._at(buffer_of(op, "picks")),
            cells=self._region(f"cells {layer}"),
            share=self._region("share"),
            x=self._at(x),
            entries=self._region("entries"),
            rows=self._at(out),
            host_rows=seen("host_rows"),
            counts=counts,
            round=self._region("round"),
            tokens=self.mode.tokens,
            top_k=self.model.shape.top_k,
            inputs=x.width,
            outputs=out.width,
            **mail,
        )

    def _op_combine(self, op: Op) -> None:
        x = buffer_of(op, "x")
        self._launch(
            "combine",
            x=self._at(x),
            entries=self._region("entries"),
            weights=self._at(buffer_of(op, "weights")),
            tokens=self.mode.tokens,
            width=x.width,
            top_k=whole(op, "top_k"),
            **self._wait(),
        )
        self._wrote(x)

    def _wait(self) -> dict[str, int]:
        """What the combine of the layer just computed waits for."""
        layer = self._ordinal - 1
        return {
            "answer": self.places.seen_answer(layer) if self._answered else 0,
            "round": self._region("round"),
            "late": self._region("result") + LATE,
            "bound": self._bound or 0,
            "layer": layer,
        }


def unsupported(what: str, why: str) -> CheckpointError:
    """A model that the kernels cannot compute."""
    return CheckpointError(
        f"the device kernels cannot compute this model: {what}", why, "try --backend cpu"
    )
