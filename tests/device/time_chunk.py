"""Every launch of one layer of a prompt's chunk, in order, with what it takes on the device.

The shape is 30B-A3B's, the weights are random: dense ones and experts of the types that are asked
for, a router of floats, all experts in slots. The launches are those that a chunk makes, from the
combine of a layer to the down of the next one; what a chunk launches once comes first. "alone" is a
graph of that launch many times, whose rows may then lie in the cache; "in layer" is what a graph of
the whole layer takes less without it. The sum of the small ones leaves out products of quantised
rows and attention.

Run: python tests/device/time_chunk.py [--tokens 2048] [--dense Q8_0] [--expert Q4_K] [--position 0]
     [--kv fp16] [--layer-only] [--on cuda|sim] [--cache FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "tests/device_sources")]
sys.path[:0] = [str(Path(__file__).resolve().parent)]

from check_kernels import device, oracle  # noqa: E402
from kernel_bench import Bench  # noqa: E402
from kernel_inputs import stored_rows  # noqa: E402
from time_products import Memory  # noqa: E402

from strata_core.checkpoint.hyper import Hyper, Rope  # noqa: E402
from strata_core.checkpoint.types import TYPES  # noqa: E402
from strata_core.interfaces import BlobLayout, BlobPart, Expert, Limits, Window  # noqa: E402
from strata_core.kernels.cpu.unpack import UNPACK  # noqa: E402
from strata_core.kernels.cpu.workspace import Dense  # noqa: E402
from strata_core.kernels.device.capture import capture, kernels_of, put  # noqa: E402
from strata_core.kernels.device.exchange import Shape  # noqa: E402
from strata_core.kernels.device.fuse import start_early  # noqa: E402
from strata_core.kernels.device.layout import WAVE  # noqa: E402
from strata_core.kernels.device.prompt_lower import (  # noqa: E402
    PromptLowering,
    prompt_exchange,
    prompt_regions,
)
from strata_core.kernels.device.prompt_waves import Ring, plan_waves  # noqa: E402
from strata_core.kernels.device.segments import Item, Places  # noqa: E402
from strata_core.kernels.device.workspace import Model  # noqa: E402
from strata_core.kernels.program import Program, Weight  # noqa: E402
from strata_core.model.build import build_program  # noqa: E402
from strata_core.runtime import Launch  # noqa: E402

WHOLE = Hyper(
    family="qwen3_moe",
    name="30b-a3b",
    layers=2,
    hidden=2048,
    vocabulary=32000,
    context=40960,
    heads=32,
    kv_heads=4,
    head_dim=128,
    rope=Rope(1e6, 128),
    norm_eps=1e-6,
    experts=128,
    top_k=8,
    expert_ffn=768,
    dense_ffn=0,
    renormalise=True,
)
SMALL = Hyper(
    family="qwen3_moe",
    name="small",
    layers=2,
    hidden=256,
    vocabulary=512,
    context=512,
    heads=4,
    kv_heads=2,
    head_dim=64,
    rope=Rope(1e6, 64),
    norm_eps=1e-6,
    experts=16,
    top_k=4,
    expert_ffn=256,
    dense_ffn=0,
    renormalise=True,
)
"""For the simulator."""

REPEATS, ENOUGH_SECONDS = 3, 0.05
SOME_ROWS, WHOLLY_RANDOM = 64, 1 << 20


class Chunk:
    """The launches of chunks of one length, on random weights; freed at the end."""

    def __init__(self, bench: Bench, asked: argparse.Namespace, hyper: Hyper) -> None:
        self.runtime, self.stream, self.device = bench.runtime, bench.stream, bench.device
        self.memory = Memory(bench.runtime, bench.device, bench.stream)
        self.asked, self.hyper = asked, hyper
        self.rng = np.random.default_rng(1)
        self.program = build_program(hyper)
        self.layout = self._layout()
        weights = {weight: self._dense(weight) for weight in self.program.weights()}
        tokens, facts = asked.tokens, self.runtime.devices()[bench.device]
        model = Model(
            program=self.program,
            layouts=dict.fromkeys(range(hyper.layers), self.layout),
            experts=hyper.experts,
            types={weight: dense.type for weight, dense in weights.items()},
            limits=Limits(tokens, tokens, asked.position + tokens, asked.kv),
            shape=Shape.of(self.program, tokens),
        )
        regions, self.exchange = prompt_regions(model), prompt_exchange(model)
        regions.base = self.memory.room(regions.nbytes)
        self.pinned = self.runtime.host_alloc(self.exchange.nbytes)
        self.exchange.settle(self.pinned)
        places = Places(regions, self.exchange, 0, weights, facts.shared, facts.matrix)
        self.lowering = PromptLowering(model, places, tokens)
        self._fill(model)

    def _layout(self) -> BlobLayout:
        h, parts, at = self.hyper, [], 0
        kind = TYPES[self.asked.expert]
        sizes = (("gate", h.expert_ffn, h.hidden), ("up", h.expert_ffn, h.hidden))
        for name, rows, columns in (*sizes, ("down", h.hidden, h.expert_ffn)):
            nbytes = rows * kind.nbytes(columns)
            parts.append(BlobPart(name, kind.name, rows, columns, at, nbytes))
            at += -(-nbytes // 256) * 256
        return BlobLayout(tuple(parts), at)

    def _dense(self, weight: Weight) -> Dense:
        """A weight of the shape and type that its ops want, some random rows many times."""
        rows, columns, kind = shape_of(self.program, weight)
        kind = kind or self.asked.dense
        some = rows if rows * columns <= WHOLLY_RANDOM else SOME_ROWS
        data = stored_rows(kind, some, columns, self.rng)
        address = self.memory.put(data, -(-rows // some))
        return Dense(kind, (rows, columns), address, rows * data.shape[1])

    def _fill(self, model: Model) -> None:
        """The frame of a chunk, keys and values of the positions before it, the experts."""
        h, tokens = self.hyper, self.asked.tokens
        width, end = h.kv_heads * h.head_dim, self.asked.position + tokens
        blank = np.zeros((h.layers * end, 4 * width), np.uint8)
        kept = [self.memory.put(blank) for _ in range(4)]
        start = np.arange(self.asked.position, end, dtype=np.int32)
        window = Window(
            ids=self.rng.integers(0, h.vocabulary, tokens).astype(np.int32),
            positions=start,
            slots=np.zeros(tokens, np.int32),
            logits_rows=np.zeros(0, np.int32),
            kernel_class="prompt",
        )
        self.exchange.fill_frame(1, window, [kept] * tokens, self.program)
        blob = np.zeros(self.layout.nbytes, np.uint8)
        for part in self.layout.parts:
            data = stored_rows(part.type, part.rows, part.columns, self.rng)
            blob[part.offset : part.offset + part.nbytes] = data.reshape(-1)
        base = self.memory.put(blob, h.experts)
        tables = self.exchange.array("waves", WAVE, h.layers, h.experts)
        for layer in range(h.layers):
            slots = {Expert(layer, i): base + i * blob.size for i in range(h.experts)}
            everyone = range(h.experts)
            plan_waves(layer, self.layout, everyone, slots, Ring(()), 0, tables[layer])

    def items(self) -> tuple[list[Item], list[Item]]:
        """What comes before the second layer, and that layer."""
        first, second, _ = self.lowering.chunk()
        wave = partial(self.lowering.wave, begin=0, count=self.hyper.experts)
        before = [self.lowering.table(None), *first.items, *wave(0)]
        return before, [*second.items, *wave(1)]

    def run(self, items: Sequence[Item]) -> None:
        """Everything once, kernels loaded."""
        self.runtime.load(self.device, kernels_of(items))
        for item in items:
            put(self.runtime, self.stream, item)
        self.runtime.synchronize(self.stream)

    def micros(self, items: Sequence[Item]) -> float:
        """Microseconds of a replay of items as one graph, the median of some rows of replays."""
        graph = capture(self.runtime, self.stream, start_early(items))
        try:
            once = self._row(graph, 1)  # warms up
            count = max(1, min(200, int(ENOUGH_SECONDS / max(once, 1e-6))))
            return float(np.median([self._row(graph, count) for _ in range(REPEATS)])) * 1e6
        finally:
            self.runtime.destroy_graph(graph)

    def _row(self, graph: int, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self.runtime.launch_graph(graph, self.stream)
        self.runtime.synchronize(self.stream)
        return (time.perf_counter() - start) / count

    def close(self) -> None:
        """Free what was taken."""
        self.memory.give_back()
        self.runtime.host_free(self.pinned)


def shape_of(program: Program, weight: Weight) -> tuple[int, int, str]:
    """(rows, columns, type) of a weight by the op that reads it; type "" is as asked."""
    op = next(op for op in program.ops if weight in op.args.values())
    if op.kernel == "rms_norm":
        return 1, int(op.args["dim"]), "F32"
    if op.kernel == "embed":
        return program.vocabulary, op.args["out"].width, ""
    assert op.kernel == "linear", op.kernel
    rows, columns = op.args["out"].width, op.args["x"].width
    if weight == op.args["bias"]:
        return 1, rows, "F32"
    return rows, columns, "F32" if weight.role == "router" else ""


def is_large(launch: Launch) -> bool:
    """Whether a launch multiplies quantised rows, or attends."""
    name, types = launch.kernel.name, launch.kernel.parameters
    product = name.endswith(("linear", "_gate_up", "_down")) and types[0] in UNPACK
    return product or name.endswith("attention")


def table(chunk: Chunk, items: Sequence[Item], *, whole: bool) -> None:
    """A line for each launch; `whole`: with what the graph of all items takes less without it."""
    print(f"{'kernel':28} {'grid':>18} {'threads':>7} {'alone us':>9} {'in layer':>9}")
    launches = [item for item in items if isinstance(item, Launch)]
    totals = [chunk.micros(items) for _ in range(2 * whole)][1:]  # the first one warms up
    small, sums = [], 0.0
    for item in launches:
        name, grid = item.kernel.name, "x".join(map(str, item.grid))
        alone = chunk.micros([item] * 10) / 10
        said = ""
        if whole:
            without = chunk.micros([other for other in items if other is not item])
            totals.append(chunk.micros(items))  # anew: clocks change meanwhile
            inside = sum(totals[-2:]) / 2 - without
            said, sums = f"{inside:9.1f}", sums + inside
            small += [] if is_large(item) else [(alone, inside)]
        label = " ".join(map(str, (name, *item.kernel.parameters)))
        line = f"{label:28} {grid:>18} {item.block[0]:7} {alone:9.1f} {said}"
        print(line, flush=True)
    if whole:
        alone, inside = np.sum(small, axis=0)
        print(f"small ones: {len(small)} of {len(launches)} launches, alone {alone:.0f} us, "
              f"in the layer {inside:.0f} us")  # fmt: skip
        print(f"a layer of {chunk.asked.tokens} tokens: {np.median(totals):.0f} us as one graph; "
              f"sum of differences {sums:.0f} us")  # fmt: skip


def eager(chunk: Chunk, items: Sequence[Item]) -> None:
    """What a layer takes launched one by one, as chunks are, and what of it the host does."""
    spent, enough = [], max(1, min(20, 40_000 // max(chunk.asked.tokens, 1)))
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(enough):
            for item in items:
                put(chunk.runtime, chunk.stream, item)
        launched = time.perf_counter()
        chunk.runtime.synchronize(chunk.stream)
        spent.append((launched - start, time.perf_counter() - start))
    host, both = np.median(spent, axis=0) / enough * 1e6
    print(f"launched one by one: {both:.0f} us a layer, of which launching takes {host:.0f} us")


def options() -> argparse.ArgumentParser:
    """What may be asked."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument("--tokens", type=int, default=2048)
    found.add_argument("--position", type=int, default=0)
    found.add_argument("--dense", default="Q8_0", choices=sorted(TYPES))
    found.add_argument("--expert", default="Q4_K", choices=sorted(TYPES))
    found.add_argument("--kv", default="fp16", choices=("fp32", "fp16", "int8"))
    found.add_argument("--layer-only", action="store_true", help="not what a chunk has once")
    found.add_argument("--on", choices=("cuda", "sim"), default="cuda")
    found.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    return found


def layer(asked: argparse.Namespace) -> int:
    """The tables of one length of chunks."""
    begin = time.perf_counter()
    if asked.on == "sim":
        asked.tokens = min(asked.tokens, 32)
    bench = oracle(asked.cache) if asked.on == "sim" else device(asked.cache, 0)
    chunk = None
    try:
        chunk = Chunk(bench, asked, SMALL if asked.on == "sim" else WHOLE)
        before, items = chunk.items()
        chunk.run([*before, *items])
        print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
        if not asked.layer_only:
            embed = [i for i in before if isinstance(i, Launch) and i.kernel.name == "embed"]
            table(chunk, embed, whole=False)
        table(chunk, items, whole=True)
        eager(chunk, items)
    finally:
        if chunk is not None:
            chunk.close()
        bench.runtime.close()
    print(f"{time.perf_counter() - begin:.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(layer(options().parse_args()))
