"""Steps around rows of weights: `linear`, `embed`, and the two halves of the experts.

The experts of a window are listed by `plan` (see `expert_plan.py`): groups of entries that share an
expert, with lists of addresses in entry order. An entry is one (token, router position).
"""

from __future__ import annotations

from llvmlite import ir

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.cpu import functions
from strata_core.kernels.cpu.elementwise import Layout, quantise_block
from strata_core.kernels.cpu.emit import F32X8, I32, I32X8, I64, VOID, Emit, V
from strata_core.kernels.cpu.float_rows import emit_float_rows, load_eight
from strata_core.kernels.cpu.products import TILE_TOKENS, emit_rows
from strata_core.kernels.cpu.steps import Args, each, latch, step
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.cpu.tiles import emit_tile_rows
from strata_core.kernels.cpu.unpack import UNPACK

LINEAR_ARGS = (
    "w",
    "stride",
    "length",
    "tokens",
    "xs",
    "ys",
    "rows",
    "chunk",
    "bias",
)
"""`length`: blocks of a quantised row, columns of a float row. `tokens`: address of their number.
`bias`: address of float32 [rows], or 0."""

CHUNK = 64
"""The most rows of one unit inside an expert."""

GROUP_FIELDS = 4
"""int64 of a group in the plan: addresses of the expert's three matrices, first entry.

The first entry of the group after the last one closes the list.
"""


def emit_any_rows(module: ir.Module, target: Target, type_name: str, layout: Layout) -> str:
    """The rows function of a quantised or float type, made at its first mention."""
    tiled = layout == "tiles" and type_name in UNPACK
    name = f"{'tiles' if tiled else 'rows'}_{type_name}"
    if name not in module.globals:
        make = emit_tile_rows if tiled else emit_rows
        (make if type_name in UNPACK else emit_float_rows)(module, target, type_name)
    return name


def _tiles(e: Emit, count: V, name: str, before: list[V], xs: V, ys: V, after: list[V]) -> None:
    """Call a rows function for all of `count` tokens, at most TILE_TOKENS at once."""
    with e.loop(0, count, TILE_TOKENS) as first:
        tokens = e.smin(count - first, e.i64(TILE_TOKENS))
        e.call(name, VOID, *before, tokens, xs + first * 8, ys + first * 8, *after)


def emit_linear(module: ir.Module, target: Target, type_name: str, layout: Layout) -> None:
    """`linear`: a unit is `chunk` rows for all tokens."""
    rows_name = emit_any_rows(module, target, type_name, layout)
    with step(module, "linear", LINEAR_ARGS) as (e, a, begin, end), e.loop(begin, end) as unit:
        first = unit * a.chunk
        rows = e.smin(a.rows - first, a.chunk)
        tokens = e.load(I64, a.tokens, align=8)
        w = a.w + first * a.stride
        _tiles(e, tokens, rows_name, [w, a.stride, a.length], a.xs, a.ys, [first * 4, rows])
        with e.when(a.bias.compare("!=", 0)), e.loop(0, tokens) as t:
            y = e.load(I64, a.ys + t * 8, align=8) + first * 4
            bias = a.bias + first * 4

            def add(kind: ir.Type, at: V, y: V = y, bias: V = bias) -> None:
                e.store(e.load(kind, y + at) + e.load(kind, bias + at), y + at)

            each(e, rows, add)


EXPERT_ARGS = (
    "groups",
    "xs",
    "ys",
    "stride_a",
    "stride_b",
    "length",
    "rows",
    "chunk",
    "status",
    "op",
)
"""`groups`: address of the plan's groups. `xs`, `ys`: addresses of the entries' address lists.
`chunk`: rows of a unit, at most CHUNK; of `gate_up` whole blocks of 32 inner activations."""


def _unit(e: Emit, a: Args, unit: V) -> tuple[V, V, V, V, V]:
    """A unit's group, first entry, number of entries, first row and number of rows."""
    chunks = (a.rows + a.chunk - 1) // a.chunk
    group = a.groups + (unit // chunks) * (8 * GROUP_FIELDS)
    first = (unit % chunks) * a.chunk
    start = e.load(I64, group, 24, align=8)
    count = e.load(I64, group, 24 + 8 * GROUP_FIELDS, align=8) - start
    return group, start, count, first, e.smin(a.rows - first, a.chunk)


def emit_gate_up(
    module: ir.Module,
    target: Target,
    types: tuple[str, str, str],
    largest: int,
    layout: Layout,
) -> None:
    """`gate_up`: rows of gate and up, `silu_mul`, and the result as `down` wants it.

    `types` are those of gate, up and down. `xs` lists the entries' inputs, records or float rows as
    gate and up take them; `ys` where the inner activations go, records or float rows as down takes
    them. `rows` is a multiple of 32.
    """
    names = [emit_any_rows(module, target, t, layout) for t in types[:2]]
    quantised = types[2] in UNPACK
    with step(module, "gate_up", EXPERT_ARGS) as (e, a, begin, end):
        work = [e.scratch(4 * CHUNK * TILE_TOKENS) for _ in range(2)]
        lists = [_own_rows(e, at) for at in work]
        strides = (a.stride_a, a.stride_b)
        with e.loop(begin, end) as unit:
            group, start, count, row, rows = _unit(e, a, unit)
            with e.loop(0, count, TILE_TOKENS) as tile:
                tokens = e.smin(count - tile, e.i64(TILE_TOKENS))
                xs, ys = ((at + (start + tile) * 8) for at in (a.xs, a.ys))
                for i, name in enumerate(names):
                    w = e.load(I64, group, 8 * i, align=8) + row * strides[i]
                    before = (w, strides[i], a.length, tokens, xs, lists[i])
                    e.call(name, VOID, *before, e.i64(0), rows)
                with e.loop(0, tokens) as t:
                    y = e.load(I64, ys + t * 8, align=8)
                    gate, up = (at + t * (4 * CHUNK) for at in work)
                    _activate(e, gate, up, rows)
                    if quantised:
                        _quantise_rows(e, a, gate, y, row, rows, (largest, layout))
                    else:
                        e.copy(y + row * 4, gate, rows * 4)


def _quantise_rows(
    e: Emit, a: Args, floats: V, pack: V, row: V, rows: V, how: tuple[int, Layout]
) -> None:
    """Quantise `rows` floats as the elements of a row that start at number `row`."""
    with e.loop(0, rows // 32) as b:
        bad = quantise_block(e, floats + b * 128, pack, row // 32 + b, *how)
        with e.when(bad):
            latch(e, a.status, a.op)


def _own_rows(e: Emit, work: V) -> V:
    """Addresses of TILE_TOKENS rows of CHUNK floats at `work`, as a list."""
    made = e.scratch(8 * TILE_TOKENS)
    with e.loop(0, TILE_TOKENS) as t:
        e.store(work + t * (4 * CHUNK), made + t * 8, align=8)
    return made


def _activate(e: Emit, gate: V, up: V, rows: V) -> None:
    """silu(gate) * up, in place of gate."""
    with e.loop(0, rows, 8) as i:
        g, u = e.load(F32X8, gate + i * 4), e.load(F32X8, up + i * 4)
        e.store(functions.silu(e, g) * u, gate + i * 4)


def emit_down(module: ir.Module, target: Target, type_name: str, layout: Layout) -> None:
    """`down`: rows of the third matrix; `xs` lists inner activations, `ys` output rows."""
    rows_name = emit_any_rows(module, target, type_name, layout)
    with step(module, "down", EXPERT_ARGS) as (e, a, begin, end), e.loop(begin, end) as unit:
        group, start, count, row, rows = _unit(e, a, unit)
        w = e.load(I64, group, 16, align=8) + row * a.stride_a
        xs, ys = a.xs + start * 8, a.ys + start * 8
        _tiles(e, count, rows_name, [w, a.stride_a, a.length], xs, ys, [row * 4, rows])


def emit_embed(module: ir.Module, target: Target, type_name: str) -> None:
    """`embed`: rows of the table as floats; docs/arithmetic.md, 3.3."""
    names = ("ids", "table", "out", "width", "stride")
    with step(module, "embed", names) as (e, a, begin, end), e.loop(begin, end) as t:
        row = a.table + e.load(I32, a.ids + t * 4).sext(I64) * a.stride
        out = a.out + t * a.width * 4
        if type_name in UNPACK:
            _quantised_values(e, target, type_name, row, out, a.width)
        else:
            _float_values(e, target, type_name, row, out, a.width)


def _float_values(e: Emit, target: Target, type_name: str, row: V, out: V, width: V) -> None:
    size = TYPES[type_name].block_bytes
    load = load_eight(e, target, type_name)
    whole = (width // 8) * 8
    with e.loop(0, whole, 8) as i:
        e.store(load(row + i * size, 0), out + i * 4)
    pad, wide = e.scratch(32), e.scratch(32)
    with e.when((width % 8).compare("!=", 0)):
        e.clear(pad, e.i64(32))
        e.copy(pad, row + whole * size, (width - whole) * size)
        e.store(load(pad, 0), wide)
        e.copy(out + whole * 4, wide, (width - whole) * 4)


def _quantised_values(e: Emit, target: Target, type_name: str, row: V, out: V, width: V) -> None:
    kind, unpack = TYPES[type_name], UNPACK[type_name]
    size = kind.block_bytes * 256 // kind.block
    tail = e.scratch(size)
    floats = e.scratch(1024)
    with e.loop(0, width, 256) as i:
        left = e.smin(width - i, e.i64(256))
        e.clear(tail, e.i64(size))
        e.copy(tail, row + (i // 256) * size, (left // kind.block) * kind.block_bytes)
        context = unpack.open(e, target, tail)
        scales = unpack.scales(e, target, context)
        for b in range(8):
            for part, w in enumerate(unpack.w(e, target, context, b)):
                for half in range(2):
                    lanes = range(8 * half, 8 * half + 8)
                    ints = w.shuffle(None, lanes).sext(I32X8)
                    value = unpack.value(e, scales, b, ints)
                    e.store(value, floats, 128 * b + 64 * part + 32 * half)
        e.copy(out + i * 4, floats, left * 4)
