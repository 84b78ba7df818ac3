"""A step that has the system begin to read the pages of a layer's experts, all at the same time.

Without it a thread that computes with a mapped file waits for one page after the other.
"""

from __future__ import annotations

import mmap

from llvmlite import ir

from strata_core.kernels.cpu.elementwise import MOST_EXPERTS
from strata_core.kernels.cpu.emit import I32, I64, POINTER
from strata_core.kernels.cpu.steps import step

ADVISE_ARGS = ("picks", "entries", "table", "sizes", "function", "advice")
"""`picks`: int32 by entry, those that are negative left out; `entries`: address of their number;
`table`: uint64 [experts, 3], addresses of gate, up and down; `sizes`: address of their bytes, int64
[3]. `function`, `advice`: see `memory.platform.pages`."""


def emit_advise(module: ir.Module) -> None:
    """`advise`: one unit, which gives the advice for each expert once."""
    kind = ir.FunctionType(I32, [POINTER, I64, I32])
    with step(module, "advise", ADVISE_ARGS) as (e, a, begin, end), e.when(begin < end):
        asked = e.scratch(4 * MOST_EXPERTS)
        e.clear(asked, e.i64(4 * MOST_EXPERTS))
        function = e.b.inttoptr(a.function.raw, kind.as_pointer())
        advice = a.advice.trunc(I32).raw
        with e.loop(0, e.load(I64, a.entries, align=8)) as i:
            pick = e.load(I32, a.picks + i * 4)
            index = e.smax(pick.sext(I64), e.i64(0))
            new = (pick >= 0) & e.load(I32, asked + index * 4).compare("==", 0)
            with e.when(new):
                e.store(e.const(I32, 1), asked + index * 4)
                for part in range(3):
                    address = e.load(I64, a.table + index * 24, 8 * part, align=8)
                    size = e.load(I64, a.sizes, 8 * part, align=8)
                    over = address & (mmap.PAGESIZE - 1)
                    start = e.b.inttoptr((address - over).raw, POINTER)
                    e.b.call(function, [start, (size + over).raw, advice])
