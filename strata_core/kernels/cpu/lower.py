"""From a program to phases: which steps each kernel becomes, and what may run side by side.

Steps of one phase either run together, unit by unit (their units are rows of the same kind, and a
row needs only itself), or side by side (rows of weights, which read what earlier phases wrote). A
quantised weight needs its input as records; they are made once, however many weights read them.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from attrs import frozen

from strata_core.errors import CheckpointError
from strata_core.kernels.cpu.attention import PARTIAL_HEAD
from strata_core.kernels.cpu.builder import Builder, Mode
from strata_core.kernels.cpu.library import Step
from strata_core.kernels.cpu.linear import CHUNK, GROUP_FIELDS
from strata_core.kernels.cpu.pool import Phase, yield_function
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.cpu.workspace import ExpertLayer
from strata_core.kernels.exact import SPLIT
from strata_core.kernels.fit import check_experts, check_heads, check_router
from strata_core.kernels.program import Op, Weight

WINDOW = 8
"""Most tokens for which attention keeps the partials of all splits."""


def mode_of(tokens: int, logits: int) -> Mode:
    """The mode of a window."""
    if tokens == 1 and logits == 1:
        return "single"
    return "window" if tokens <= WINDOW else "prompt"


WAVES = 2
"""How often a layer's experts that were waited for are computed as they land: after the first one
of them, and after the last. What was there at once is computed before."""


class Lowering(Builder):
    """Turns one program into the phases of one mode."""

    def lower(self) -> list[Phase]:
        """All phases in order."""
        for number, op in enumerate(self.program.ops):
            self._op = number
            handler = getattr(self, f"_{op.kernel}")
            handler(op)
        return self._made()

    def lower_only(self, number: int) -> list[Phase]:
        """The phases of one op by itself, its inputs being floats that others wrote."""
        self._op = number
        op = self.program.ops[number]
        getattr(self, f"_{op.kernel}")(op)
        return self._made()

    # kernels

    def _embed(self, op: Op) -> None:
        table = self.weights[cast("Weight", op.args["table"])]
        out = self._buffer(op, "out")
        args = [self.frame.ids.ctypes.data, table.address, self._at(op, "out"), out.width]
        step = Step("embed", (table.type,))
        self._together("token", step, [*args, table.stride], self.frame.count("token"))
        self._wrote(op, "out")

    def _rms_norm(self, op: Op) -> None:
        weight = self.weights[cast("Weight", op.args["weight"])]
        dim = self._int(op, "dim")
        eps = int(np.float32(cast("float", op.args["eps"])).view(np.int32))
        runs = self._buffer(op, "x").width // dim
        args = [self._at(op, "x"), self._at(op, "out"), weight.address, runs, dim, eps]
        self._rowwise(op, "rms_norm", args, "out")

    def _linear(self, op: Op) -> None:
        weight = self.weights[cast("Weight", op.args["weight"])]
        x, out = self._buffer(op, "x"), self._buffer(op, "out")
        rows, columns = weight.shape
        source = self._input(x, weight.type)
        length = columns // 32 if weight.type in UNPACK else columns
        bias = op.args["bias"]
        chunk = self._chunk(rows)
        storage = self.work.storage
        args = [
            weight.address,
            weight.stride,
            length,
            self.frame.count(x.rows),
            storage.addresses(source),
            storage.addresses(self.work.buffer(out)),
            rows,
            chunk,
            self.weights[cast("Weight", bias)].address if bias is not None else 0,
        ]
        units = storage.words([-(-rows // chunk)])
        self._side(self._products("linear", weight.type), args, units, x.name, out.name)
        self._wrote(op, "out")

    def _chunk(self, rows: int) -> int:
        """Rows of a unit: whole tiles of eight, small enough to give every thread several."""
        share = rows // (self.threads * 6) // 8 * 8
        return max(8, min(64, share))

    def _rope(self, op: Op) -> None:
        tables = [self.frame.cos.ctypes.data, self.frame.sin.ctypes.data]
        sizes = [self._int(op, "heads"), self._int(op, "head_dim"), self.frame.cos.shape[1]]
        self._rowwise(op, "rope", [self._at(op, "x"), *tables, *sizes], "x")

    def _layer_offset(self, op: Op) -> int:
        return self._int(op, "layer") * self.work.limits.context

    def _kv_append(self, op: Op) -> None:
        args = [
            self._at(op, "k"),
            self._at(op, "v"),
            self._buffer(op, "k").width,
            self.frame.positions.ctypes.data,
            self.frame.places.ctypes.data,
            self._layer_offset(op),
            *self._status(),
        ]
        step = Step("kv_append", (self.work.limits.kv_type,))
        self._together("token", step, args, self.frame.count("token"))

    def _attention(self, op: Op) -> None:
        heads, kv_heads = self._int(op, "heads"), self._int(op, "kv_heads")
        dim, window = self._int(op, "head_dim"), self._int(op, "window")
        group = heads // kv_heads
        check_heads(group, dim, self.work.limits.kv_type, _unsupported)
        cut = self.frame.splits(window, kv_heads)
        out = self._buffer(op, "out")
        token = [self.frame.positions.ctypes.data, self.frame.places.ctypes.data]
        shape = [self._layer_offset(op), kv_heads * dim, kv_heads, group, window]
        kind = (self.work.limits.kv_type, dim)
        if self.mode == "prompt":
            args = [self._at(op, "q"), self._at(op, "out"), *token, *shape]
            units = int(cut.whole_units.ctypes.data)
            self._side(Step("whole_attention", kind), args, units, "attention", out.name)
        else:
            partials = self._partials(heads, dim)
            splits = int(cut.splits.ctypes.data)
            args = [self._at(op, "q"), partials, *token, *shape, splits]
            units = int(cut.units.ctypes.data)
            self._side(Step("attention", kind), args, units, "attention", "partials")
            args = [self._at(op, "out"), partials, token[0], heads, window, splits]
            self._together("token", Step("merge", (dim,)), args, self.frame.count("token"))
        self._wrote(op, "out")

    def _partials(self, heads: int, dim: int) -> int:
        most = -(-self.work.limits.context // SPLIT) + 1
        rows = min(WINDOW, self.work.limits.tokens) * heads * most
        made = self.work.scratch("partials", rows, PARTIAL_HEAD + dim, "float32")
        return int(made.ctypes.data)

    def _add(self, op: Op) -> None:
        x = self._at(op, "x")
        self._rowwise(op, "add", [x, self._at(op, "y"), x, self._buffer(op, "x").width], "x")

    def _silu_mul(self, op: Op) -> None:
        args = [self._at(op, n) for n in ("gate", "up", "out")]
        self._rowwise(op, "silu_mul", [*args, self._buffer(op, "out").width], "out")

    def _gate_add(self, op: Op) -> None:
        args = [self._at(op, n) for n in ("x", "y", "gate")]
        self._rowwise(op, "gate_add", [*args, self._buffer(op, "x").width], "x")

    def _combine(self, op: Op) -> None:
        args = [self._at(op, n) for n in ("x", "rows", "weights")]
        width = self._buffer(op, "x").width
        self._rowwise(op, "combine", [*args, width, self._int(op, "top_k")], "x")

    def _gather(self, op: Op) -> None:
        self._end_phase()
        args = [self._at(op, "x"), self.frame.logits_rows.ctypes.data, self._at(op, "out")]
        self._rowwise(op, "gather", [*args, self._buffer(op, "out").width], "out")

    def _route(self, op: Op) -> None:
        logits = self._buffer(op, "logits")
        check_router(logits.width, _unsupported)
        args = [self._at(op, n) for n in ("logits", "picks", "weights")]
        sizes = [logits.width, self._int(op, "top_k"), int(bool(op.args["renormalise"]))]
        step = Step("route")
        count = self.frame.count("token")
        self._together("token", step, [*args, *sizes, *self._status()], count)

    def _experts(self, op: Op) -> None:
        x, layer = self._buffer(op, "x"), self.experts[self._int(op, "layer")]
        gate = layer.layout.parts[0]
        check_experts(self._int(op, "layer"), layer.layout, _unsupported)
        source = self._input(x, gate.type)
        if not self.serving.asks:
            self._hint(op, layer)
            self._groups(op, layer, source, self._at(op, "picks"))
        else:
            self._in_waves(op, layer, source)
        self._wrote(op, "out")

    def _in_waves(self, op: Op, layer: ExpertLayer, source: np.ndarray) -> None:
        """Compute the experts that are there while the others are on their way, then those."""
        entries, storage = self.work.rows("pick"), self.work.storage
        now, late = (self.work.scratch(n, 1, entries, "int32").ctypes.data for n in ("now", "late"))
        # a word of its own for each wave: threads may still look at one while the next is written
        left = [storage.words([0]) for _ in range(WAVES + 1)]
        serving, count = self.serving, self.frame.count("pick")
        box = int(serving.box.ctypes.data)
        picks = [self._at(op, "picks"), count, layer.table.ctypes.data, now, late, left[0]]
        how = [box, self._int(op, "layer"), serving.send, serving.pipe]
        self._together(self._one_unit(), Step("ask"), [*picks, *how], self.frame.one)
        self._groups(op, layer, source, now)
        for wave in range(WAVES):
            self._end_phase()
            # a wave is three phases: its experts, gate and up, down
            self.phases[-1].unless, self.phases[-1].leaves_out = left[wave], 3 * (WAVES - wave)
            least = 1 if wave + 1 < WAVES else len(layer.table)
            args = [late, count, now, left[wave + 1], box, least, yield_function()]
            self._together("leader", Step("take"), args, self.frame.one)
            self.phases[-1].leader = True
            self._groups(op, layer, source, now, "leader")
        self._end_phase()

    def _hint(self, op: Op, layer: ExpertLayer) -> None:
        """Have the system begin to read the pages of all experts that are picked."""
        hints = self.serving.hints
        if hints is None:
            return
        sizes = self.work.storage.words([part.nbytes for part in layer.layout.parts])
        args = [self._at(op, "picks"), self.frame.count("pick"), layer.table.ctypes.data, sizes]
        args += [hints.function, hints.will_need]
        self._together(self._one_unit(), Step("advise"), args, self.frame.one)

    def _one_unit(self) -> str:
        """The domain of a step with one unit; with a single token it may follow the routing."""
        return "token" if self.mode == "single" else "plan"

    def _groups(
        self, op: Op, layer: ExpertLayer, source: np.ndarray, picks: int, domain: str | None = None
    ) -> None:
        """Compute the experts of the picks at an address."""
        gate, up, down = layer.layout.parts
        types = (gate.type, up.type, down.type)
        chunks = self._expert_chunk(gate.rows), self._expert_chunk(down.rows)
        lists = self._plan(op, layer, source, picks, chunks, domain or self._one_unit())
        status = self._status()
        inputs = gate.columns // 32 if gate.type in UNPACK else gate.columns
        strides = [p.nbytes // p.rows for p in (gate, up, down)]
        args = [lists.groups, lists.xs, lists.inner, strides[0], strides[1], inputs, gate.rows]
        step = self._products("gate_up", *types)
        self._side(step, [*args, chunks[0], *status], lists.units, "plan", "inner")
        length = down.columns // 32 if down.type in UNPACK else down.columns
        args = [lists.groups, lists.inner, lists.ys, strides[2], 0, length, down.rows]
        step = self._products("down", down.type)
        out = self._buffer(op, "out").name
        self._side(step, [*args, chunks[1], *status], lists.units + 8, "inner", out)

    def _expert_chunk(self, rows: int) -> int:
        """Rows of a unit of an expert's part: blocks of 32, which `gate_up` makes of its result.

        For a few tokens they are so few that the threads share a single expert evenly; prompts have
        units enough, and use what they unpacked for longer.
        """
        if self.mode == "prompt":
            return CHUNK
        return min(CHUNK, max(32, self._chunk(rows) // 32 * 32))

    def _plan(
        self,
        op: Op,
        layer: ExpertLayer,
        source: np.ndarray,
        picks: int,
        chunks: tuple[int, int],
        domain: str,
    ) -> _Lists:
        """Add the step that sorts picks; what it writes. `chunks`: rows of the units."""
        gate, _, down = layer.layout.parts
        entries = self.work.rows("pick")
        storage, scratch = self.work.storage, self.work.scratch
        kind = "pack" if down.type in UNPACK else "float32"
        inner = scratch(("inner", self._layout), entries, gate.rows, kind)
        count = len(layer.table)
        groups = scratch("groups", count + 1, GROUP_FIELDS, "int64")
        lists = _Lists(
            groups=int(groups.ctypes.data),
            units=int(scratch("units", 1, 2, "int64").ctypes.data),
            xs=int(scratch("xs", 1, entries, "int64").ctypes.data),
            ys=int(scratch("ys", 1, entries, "int64").ctypes.data),
            inner=int(scratch("inner list", 1, entries, "int64").ctypes.data),
        )
        args = [
            picks,
            self.frame.count("token"),
            self.program.top_k,
            count,
            layer.table.ctypes.data,
            lists.groups,
            lists.units,
            -(-gate.rows // chunks[0]),
            -(-down.rows // chunks[1]),
            storage.addresses(source),
            storage.addresses(self.work.buffer(self._buffer(op, "out"))),
            storage.addresses(inner),
            lists.xs,
            lists.ys,
            lists.inner,
            layer.served.ctypes.data,
        ]
        self._together(domain, Step("plan"), args, self.frame.one)
        return lists


@frozen
class _Lists:
    """Addresses of what `plan` writes."""

    groups: int
    units: int
    xs: int
    ys: int
    inner: int


def _unsupported(what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the cpu backend cannot compute this model: {what}", why, "try --backend reference"
    )
