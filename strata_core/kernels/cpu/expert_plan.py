"""Sorting the picks of a window by expert, so that tokens that share an expert read it once."""

from __future__ import annotations

from llvmlite import ir

from strata_core.kernels.cpu.elementwise import MOST_EXPERTS
from strata_core.kernels.cpu.emit import I32, I64, Emit, V
from strata_core.kernels.cpu.linear import GROUP_FIELDS
from strata_core.kernels.cpu.steps import Args, step

PLAN_ARGS = (
    "picks",
    "tokens",
    "top_k",
    "experts",
    "table",
    "groups",
    "units",
    "chunks_up",
    "chunks_down",
    "xs",
    "ys",
    "inner",
    "out_xs",
    "out_ys",
    "out_inner",
    "counters",
)
"""`table`: uint64 [experts, 3], addresses of gate, up and down. `groups`: int64 [experts + 1,
GROUP_FIELDS], written here. `units`: int64 [2], written: units of `gate_up` and of `down`.
`xs` [tokens] and `ys`, `inner` [entries]: addresses by token and by entry; `out_*` the same in the
order of the groups, written here. `counters`: int64 [2 + experts], added to: entries,
groups, and the entries of each expert. A negative pick belongs to another lane; its entry is left
out."""


def emit_plan(module: ir.Module) -> None:
    """`plan`: one unit, which groups all picks by expert, ascending, entries in order."""
    with step(module, "plan", PLAN_ARGS) as (e, a, begin, end), e.when(begin < end):
        entries = e.load(I64, a.tokens, align=8) * a.top_k
        starts = e.scratch(8 * (MOST_EXPERTS + 1))
        e.clear(starts, (a.experts + 1) * 8)
        with e.loop(0, entries) as i:
            # those left out are counted in the first cell, which nothing reads
            pick = e.smax(e.load(I32, a.picks + i * 4).sext(I64), e.i64(-1))
            cell = starts + (pick + 1) * 8
            e.store(e.load(I64, cell, align=8) + 1, cell, align=8)
        groups, total = e.var(I64, 0), e.var(I64, 0)
        with e.loop(0, a.experts) as x:
            cell = starts + (x + 1) * 8
            count = e.load(I64, cell, align=8)
            with e.when(count > 0):
                group = a.groups + groups.get() * (8 * GROUP_FIELDS)
                for part in range(3):
                    address = e.load(I64, a.table + x * 24, 8 * part, align=8)
                    e.store(address, group, 8 * part, align=8)
                e.store(total.get(), group, 24, align=8)
                groups.set(groups.get() + 1)
                own = a.counters + x * 8
                e.store(e.load(I64, own, 16, align=8) + count, own, 16, align=8)
            # from here on the cell before holds where the expert's next entry goes
            e.store(total.get(), starts + x * 8, align=8)
            total.set(total.get() + count)
        e.store(total.get(), a.groups + groups.get() * (8 * GROUP_FIELDS), 24, align=8)
        with e.loop(0, entries) as i:
            pick = e.load(I32, a.picks + i * 4).sext(I64)
            with e.when(pick >= 0):
                _place(e, a, starts + pick * 8, i)
        e.store(groups.get() * a.chunks_up, a.units, align=8)
        e.store(groups.get() * a.chunks_down, a.units, 8, align=8)
        for n, value in enumerate((total.get(), groups.get())):
            e.store(e.load(I64, a.counters, 8 * n, align=8) + value, a.counters, 8 * n, align=8)


def _place(e: Emit, a: Args, cell: V, entry: V) -> None:
    """Put an entry's addresses where its expert's next one goes."""
    to = e.load(I64, cell, align=8)
    e.store(to + 1, cell, align=8)
    e.store(e.load(I64, a.xs + (entry // a.top_k) * 8, align=8), a.out_xs + to * 8, align=8)
    e.store(e.load(I64, a.ys + entry * 8, align=8), a.out_ys + to * 8, align=8)
    e.store(e.load(I64, a.inner + entry * 8, align=8), a.out_inner + to * 8, align=8)
