"""A round of decode and every kernel in it: bits against the CPU's, times, bytes a second.

Meant for the shape of 30B-A3B with few layers and everything in slots. Four parts, each with its
table: kernels alone on random inputs, bit by bit; products of prompts (time_products.py) and
attention of prompts (time_prompts.py); windows of 1 to 8 tokens against the CPU backend; times of
replayed graphs, and of rounds that are made otherwise (a fusion undone, nothing asked for ahead, no
early starts). A kernel's time *in the round* is what the round takes less without it; *alone* is
a graph of it over all layers, whose weights may then lie in the cache. A round of 48 layers is what
one layer takes, 47 times more.

Leaves with 1 where bits differ.

Run: python tests/device/time_kernels.py MODEL [--synth SCRIPT --layers 4] [--position 400]
     [--on cuda|sim] [--no-kernels] [--no-products] [--cache FOLDER]
`--synth` is a script that writes MODEL where it is not there, called with
MODEL --shape 30b-a3b --layers N.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
from attrs import evolve

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "tests/device_sources")]
sys.path[:0] = [str(Path(__file__).resolve().parent)]

from check_models import Check, device_backend, digest, window  # noqa: E402
from time_products import Shape, time_products  # noqa: E402

from strata_core.kernels.device.capture import capture, kernels_of  # noqa: E402
from strata_core.kernels.device.fuse import fuse, start_early  # noqa: E402
from strata_core.kernels.device.fused_table import FUSED  # noqa: E402
from strata_core.kernels.device.lower import Lowering  # noqa: E402
from strata_core.kernels.device.table import make_launch, unpack  # noqa: E402
from strata_core.runtime import Launch  # noqa: E402
from strata_core.sources.mmap import MappedFile  # noqa: E402

LAYERS, REPEATS, REPLAYS = 48, 5, 40
ENTRIES = ("gate_up", "down")


def kernels(asked) -> int:
    """Kernels of this shape on random inputs; how many differ from the CPU's steps."""
    from attention_cases import append_cases, attention_cases, merge_cases
    from buffer_cases import buffer_cases
    from check_kernels import check, device, oracle, possible
    from fused_cases import fused_cases, products, routers
    from prompt_cases import on_matrix_units, prompt_cases_of
    from weight_cases import down_cases, embed_cases, expert_cases, linear_cases

    cases = [
        *buffer_cases(),
        *fused_cases(every=False),
        *products(("Q8_0",) * 3, np.random.default_rng(3)),
        *routers("F32", np.random.default_rng(3)),
        *expert_cases("Q4_K", "Q4_K", "Q4_K"),
        *chain(down_cases("Q4_K"), linear_cases("Q8_0"), linear_cases("F32")),
        *chain(embed_cases("Q8_0"), append_cases("fp16"), attention_cases("fp16", 128)),
        *merge_cases(128),
        *chain(prompt_cases_of("Q4_K"), on_matrix_units(prompt_cases_of("Q4_K"))),
        *chain(prompt_cases_of("Q8_0"), on_matrix_units(prompt_cases_of("Q8_0"))),
    ]
    tested = oracle(asked.cache) if asked.on == "sim" else device(asked.cache, 0)
    cases = possible(cases, tested)
    try:
        if not asked.no_products:
            shape = Shape(256, 256, 4, 2, 64) if asked.on == "sim" else Shape()
            time_products(tested, ("Q4_K", "Q6_K", "Q8_0"), (512, 4096), shape)
        tested.runtime.load(tested.device, [case.key for case in cases])
        return check(cases, oracle(asked.cache), tested)
    finally:
        tested.runtime.close()


def identity(mine, executor, asked) -> int:
    """Windows of 1 to 8 tokens; how many sizes differ from the CPU's logits."""
    wanted, _ = mine.cpu()
    wrong = []
    for size in range(1, 9):
        slot = executor.open_sequence()
        got = np.concatenate(
            [
                executor.run(window(mine.ids[i : i + size], i, slot)).copy()
                for i in range(0, len(mine.ids), size)
            ]
        )
        executor.close_sequence(slot)
        if got.tobytes() != wanted.tobytes():
            wrong.append(size)
    said = f"DIFFERS for {wrong}" if wrong else "equal for windows of 1 to 8"
    print(
        f"rounds of {len(mine.ids)} tokens against the CPU ({digest(wanted)}): {said}", flush=True
    )
    return len(wrong)


class Clock:
    """Times of graphs on the executor's stream."""

    def __init__(self, maker):
        self.maker = maker
        self.runtime, self.stream = maker.runtime, maker.stream

    def items(self, mode, without=""):
        """What a round of a mode puts on the stream, fused but for one kernel; one graph."""
        (segment,) = Lowering(self.maker.model, self.maker.places, mode, frozenset()).lower()
        with patch.dict(FUSED):
            FUSED.pop(without, None)
            return fuse(segment).items

    def graph(self, items, replays=REPLAYS, early=True) -> float:
        """Microseconds of one replay of items, the median of some rows of replays."""
        self.runtime.load(self.maker.device, kernels_of(items))
        items = start_early(items) if early else [_late(item) for item in items]
        graph = capture(self.runtime, self.stream, items)
        times = []
        try:
            for turn in range(REPEATS + 1):
                start = time.perf_counter()
                for _ in range(replays):
                    self.runtime.launch_graph(graph, self.stream)
                self.runtime.synchronize(self.stream)
                times.append((time.perf_counter() - start) / replays)
                if not turn:
                    times.clear()  # the first row warms up
        finally:
            self.runtime.destroy_graph(graph)
        return float(np.median(times)) * 1e6


def _late(item):
    return evolve(item, early=False) if isinstance(item, Launch) else item


def changed(items, kernel, **values):
    """The same items, some arguments of a kernel's launches being others."""
    return [
        make_launch(kernel, item.kernel.parameters, **{**unpack(kernel, item.args), **values})
        if isinstance(item, Launch) and item.kernel.name == kernel
        else item
        for item in items
    ]


def otherwise(clock: Clock, mode, items, layers: int) -> None:
    """The table of rounds that are made otherwise; the round as it is before and after them."""
    names = {item.kernel.name for item in items if isinstance(item, Launch)}
    ways = [
        *((f"{name} unfused", clock.items(mode, name), True) for name in FUSED if name in names),
        ("nothing asked for ahead", changed(items, "attention", ahead=0, ahead_lines=0), True),
        ("picks not published", changed(items, "dispatch", mail_picks=0), True),
        ("gate_up by 4 warps", changed(items, "gate_up", warps=4), True),
        ("no early starts", items, False),
        ("as it is", items, True),
    ]
    whole = clock.graph(items)
    print(f"{'the round with':26} {'items':>5} {'us':>9} {'us a layer more':>16}")
    for what, made, early in ways:
        took = clock.graph(made, early=early)
        print(f"{what:26} {len(made):5} {took:9.1f} {(took - whole) / layers:16.2f}", flush=True)


def weight_bytes(launch: Launch) -> int:
    """Bytes of weights that a launch reads."""
    v, name = unpack(launch.kernel.name, launch.args), launch.kernel.name
    if name == "products":
        return sum(v[f"rows_{n}"] * v[f"stride_{n}"] for n in "abc")
    if name in ("linear", "linear_add"):
        return v["rows"] * v["stride"]
    if name == "norm_linear":
        return v["outputs"] * v["stride"]
    if name == "gate_up":
        return v["count"] * v["rows"] * (v["gate_stride"] + v["up_stride"])
    return v["count"] * v["rows"] * v["stride"] if name == "down" else 0


def named(launch: Launch, vocabulary: int) -> str:
    """What a launch is called in the tables; the products of a layer and the head apart."""
    name = launch.kernel.name
    if name == "linear":
        rows = unpack(name, launch.args)["rows"]
        return "head" if rows == vocabulary else f"linear {launch.kernel.parameters[0]}"
    return name


def one_layer(items):
    """Places of items that make a layer each: from behind a `down` to the next one."""
    launches = [(i, item) for i, item in enumerate(items) if isinstance(item, Launch)]
    downs = [i for i, item in launches if item.kernel.name == "down"]
    return [(a + 1, b + 1) for a, b in pairwise(downs)]


def times(clock: Clock, mode, vocabulary: int) -> None:
    """The tables of times of one mode."""
    items = clock.items(mode)
    whole = clock.graph(items)
    between = one_layer(items)
    cut = [item for i, item in enumerate(items) if not any(a <= i < b for a, b in between)]
    single = clock.graph(cut)
    layer = (whole - single) / max(len(between), 1)
    total = (single + (LAYERS - 1) * layer) / 1e3
    print(
        f"{mode.tokens} tokens, {mode.splits} splits: {len(items)} items, {whole:.1f} us a replay, "
        f"{layer:.1f} us a layer; {LAYERS} layers {total:.3f} ms, {1e3 / total:.0f} rounds/s",
        flush=True,
    )
    groups = defaultdict(list)
    for item in items:
        if isinstance(item, Launch):
            groups[named(item, vocabulary)].append(item)
    print(
        f"{'kernel':18} {'times':>5} {'in round':>9} {'alone us':>9} {'MB':>7} {'GB/s alone':>10}"
    )
    for name, launches in groups.items():
        without = [item for item in items if item not in launches]
        inside = (whole - clock.graph(without)) / len(launches)
        copies = max(1, 24 // len(launches))
        alone = clock.graph(launches * copies) / (len(launches) * copies)
        nbytes = sum(map(weight_bytes, launches)) / len(launches)
        rate = f"{nbytes / alone / 1e3:10.0f}" if nbytes else ""
        print(
            f"{name:18} {len(launches):5} {inside:9.2f} {alone:9.2f} {nbytes / 1e6:7.2f} {rate}",
            flush=True,
        )
    if mode.tokens < 3:
        otherwise(clock, mode, items, len(between) + 1)


def rounds(mine, asked) -> int:
    """Identity and times of the model with everything in slots."""
    checkpoint = mine.checkpoint
    total = checkpoint.experts.count * len(checkpoint.experts.layouts)
    backend = device_backend(mine.context(expert_cache=total), asked.on)
    executor = source = None
    try:
        backend.open_contexts()
        source = MappedFile(checkpoint.experts)
        executor = mine.bound(backend, source)
        wrong = identity(mine, executor, asked)
        slot = executor.open_sequence()
        ids = np.random.default_rng(2).integers(3, checkpoint.hyper.vocabulary, asked.position)
        for i in range(0, asked.position, 8):
            executor.run(window(ids[i : i + 8], i, slot))
        walls = []
        for _ in range(30):
            last = window(ids[:1], asked.position, slot)
            start = time.perf_counter()
            executor.run(last)
            walls.append(time.perf_counter() - start)
        print(f"executor.run of one token: {np.median(walls) * 1e6:.0f} us with the host's part")
        clock = Clock(executor._maker)
        for count in (1, 2, 4, 8):
            at = max(asked.position - count, 0)
            executor.run(window(ids[:count], at, slot))
            times(
                clock,
                executor.ready(window(ids[:count], at, slot), doorbell=False).mode,
                checkpoint.hyper.vocabulary,
            )
        executor.close_sequence(slot)
        return wrong
    finally:
        for thing in (executor, source, backend):
            if thing is not None:
                thing.close()


def prompts(asked) -> int:
    """Attention of prompts as in 30B-A3B, or on the simulator of very small ones."""
    from time_prompts import attention, options

    given = ["--on", asked.on, "--cache", str(asked.cache)]
    given += ["--no-bits"] * asked.no_kernels
    given += ["--chunk", "32", "--longest", "128"] * (asked.on == "sim")
    return attention(options().parse_args(given))


def main() -> int:
    """Parse and run."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("model", type=Path)
    options.add_argument("--synth", type=Path)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--position", type=int, default=400)
    options.add_argument("--on", choices=("cuda", "sim"), default="cuda")
    options.add_argument("--no-kernels", action="store_true")
    options.add_argument("--no-products", action="store_true", help="no times of prompts' products")
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    asked = options.parse_args()
    asked.tokens, asked.rounds = 24, 0
    start = time.perf_counter()
    if not asked.model.exists() and asked.synth:
        shape = ["--shape", "30b-a3b", "--layers", str(asked.layers)]
        subprocess.run([sys.executable, str(asked.synth), str(asked.model), *shape], check=True)
        print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
    wrong = 0 if asked.no_kernels else kernels(asked)
    print(f"after {time.perf_counter() - start:.1f} s", flush=True)
    wrong += rounds(Check(asked.model, asked), asked)
    wrong += prompts(asked)
    print(f"{wrong} differ; {time.perf_counter() - start:.1f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
