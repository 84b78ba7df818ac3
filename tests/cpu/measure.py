"""Rates of the row kernels on this machine: `python tests/cpu/measure.py [--threads 1,2,4,8,16]`.

First every variant that the processor runs is checked against the golden vectors. Then, for each
weight type: the rate from the caches with one thread, and the rate from memory with several, beside
the rate at which the same threads merely read memory. What the kernels lose against that is the
most that any cheaper arithmetic, such as one activation plane, could win back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import numpy as np

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.cpu.emit import I32X8
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.lower import WINDOW
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.steps import NOTHING_LATCHED, step
from strata_core.kernels.cpu.storage import Storage
from strata_core.kernels.cpu.target import VARIANTS, Target, host_target, usable_variants
from strata_core.kernels.cpu.unpack import UNPACK

GOLDEN = Path(__file__).parents[1] / "arithmetic" / "golden"
COLUMNS = 2048
CHUNK = 64


class Rows:
    """Step `linear` of one type over all of `memory`, `turns` times, for `tokens` tokens."""

    def __init__(self, library, memory, type_name, tokens, turns=1, columns=COLUMNS):
        self.store = store = Storage()
        stride = TYPES[type_name].nbytes(columns)
        rows = memory.nbytes // stride // CHUNK * CHUNK
        self.nbytes, self.macs = turns * rows * stride, turns * rows * columns * tokens
        x = np.random.default_rng(0).standard_normal((tokens, columns)).astype(np.float32)
        pack = store.packs(tokens, columns)
        status = store.zeros((1,), np.uint32)
        status[0] = NOTHING_LATCHED
        tiled = tokens > WINDOW
        quantise = Step("quantise_tiles" if tiled else "quantise")
        call(library, quantise, [x, pack, columns, pack.strides[0], status, 0], tokens)
        out = store.zeros((tokens, rows), np.float32)
        count = store.words([tokens])
        args = [
            memory.ctypes.data,
            stride,
            columns // 32,
            count,
            store.addresses(pack),
            store.addresses(out),
            rows,
            CHUNK,
            0,
        ]
        units = store.words([rows // CHUNK])
        kind = (type_name, "tiles") if tiled else (type_name,)
        function = library.address(Step("linear", kind))
        call_ = StepCall(function, store.words(args), units)
        self.schedule = Schedule.of([Phase((call_,), side_by_side=True)] * turns)


def call(library, wanted, args, units):
    block = np.array([a.ctypes.data if isinstance(a, np.ndarray) else a for a in args], np.int64)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(library.address(wanted))
    function(block.ctypes.data, 0, units)


def reading(compiler, memory):
    """A schedule that reads memory and adds it up: (schedule, what it needs kept, bytes)."""
    module = compiler.module("reading")
    names = ("memory", "chunk", "out")
    with step(module, "reading", names) as (e, a, begin, end), e.loop(begin, end) as unit:
        sums = [e.var(I32X8, 0) for _ in range(4)]
        start = a.memory + unit * a.chunk
        with e.loop(0, a.chunk, 128) as at:
            for j, s in enumerate(sums):
                s.set(s.get() + e.load(I32X8, start + at, 32 * j))
        total = (sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())
        e.store(total, a.out + unit * 32)
    code = compiler.compile(module)
    store = Storage()
    chunk = 1 << 16
    units = memory.nbytes // chunk
    out = store.zeros((units, 8), np.int32)
    args = store.words([memory.ctypes.data, chunk, out.ctypes.data])
    made = StepCall(code.address("reading"), args, store.words([units]))
    schedule = Schedule.of([Phase((made,), side_by_side=True)])
    return schedule, (store, code), units * chunk


def seconds(pool, schedule, repeats):
    """Least and median time of a round."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        pool.run(schedule)
        times.append(time.perf_counter() - began)
    return min(times), float(np.median(times))


def check_bits(target: Target) -> dict[str, bool]:
    """Whether each quantised type has the golden bits with a target's variant."""
    library = Library(Compiler(target, None, print))
    found = {}
    for name in UNPACK:
        g = np.load(GOLDEN / f"{name}.npz")
        x = np.ascontiguousarray(g["x"])
        store = Storage()
        pack = store.packs(3, x.shape[1])
        status = store.zeros((1,), np.uint32)
        call(library, Step("quantise"), [x, pack, x.shape[1], pack.strides[0], status, 0], 3)
        same = True
        for tokens in (1, 2, 3):
            out = store.zeros((tokens, 11), np.float32)
            weight = np.ascontiguousarray(g["weight"])
            shape = [weight, weight.nbytes // 11, x.shape[1] // 32, store.words([tokens])]
            lists = [store.addresses(pack), store.addresses(out), 11, 16, 0]
            call(library, Step("linear", (name,)), [*shape, *lists], 1)
            expected = g["out"][:tokens]
            nan = np.isnan(expected)
            same &= out[~nan].tobytes() == expected[~nan].tobytes()
        found[name] = bool(same)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--types", default="Q8_0,Q4_K,Q6_K,Q4_0,MXFP4")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    host = host_target(given.variant)
    print(json.dumps({"cpu": host.cpu, "variant": host.variant}))
    for variant in usable_variants(host.features, host.triple):
        print(json.dumps({"variant": variant, "golden bits": check_bits(host_target(variant))}))
    compiler = Compiler(host, None, print)
    library = Library(compiler)
    # bytes from 32 to 95 make ordinary scales in every type; denormals would be slow on some
    block = np.random.default_rng(1).integers(32, 96, 1 << 20, dtype=np.uint8)
    memory = np.tile(block, given.mib)
    types = given.types.split(",")
    pool = Pool(compiler, 1)
    for name in types:
        for tokens in (1, 2, 4, 8, 32):
            rows = Rows(library, memory[: 1 << 18], name, tokens, turns=16)
            least, median = seconds(pool, rows.schedule, 60)
            rate = {"GB/s": rows.nbytes / least / 1e9, "GMAC/s": rows.macs / least / 1e9}
            rate |= {"median GB/s": rows.nbytes / median / 1e9}
            show({"type": name, "from": "cache", "threads": 1, "tokens": tokens}, rate)
    pool.close()
    for threads in map(int, given.threads.split(",")):
        pool = Pool(compiler, threads)
        schedule, keep, nbytes = reading(compiler, memory)
        runs = {"read": (schedule, nbytes)}
        made = {name: Rows(library, memory, name, 1) for name in types}
        runs |= {name: (rows.schedule, rows.nbytes) for name, rows in made.items()}
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.repeats):
            for name, (plan, size) in runs.items():
                rates[name].append(size / seconds(pool, plan, 1)[0] / 1e9)
        for name, found in rates.items():
            rate = {"GB/s": max(found), "median GB/s": float(np.median(found))}
            rate |= {"of reading": float(np.median(found) / np.median(rates["read"]))}
            show({"type": name, "from": "memory", "threads": threads, "tokens": 1}, rate)
        pool.close()
        del keep


def show(what: dict[str, object], rates: dict[str, float]) -> None:
    print(json.dumps(what | {k: round(v, 2) for k, v in rates.items()}), flush=True)


if __name__ == "__main__":
    main()
