"""Products of prompts on a device: both kinds of kernels side by side, by type and tokens.

The shape is 30B-A3B's: 128 experts of 768 rows of 2048 (gate, up) and 2048 rows of 768 (down), 8 of
them a token, picked at random; a dense matrix of 4096 rows of 2048. Plain kernels multiply by
four-byte dot products, the others on matrix units. TOP/s count two operations for a weight and a
token, however many planes there are. Times are those of replayed graphs, the median of some.

Run: python tests/device/time_products.py [--types Q4_K,Q8_0] [--tokens 512,4096] [--cache FOLDER]
`--on sim` runs it on the simulator, for the program's sake.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "tests/device_sources")]
sys.path[:0] = [str(Path(__file__).resolve().parent)]

from kernel_bench import pack_planes  # noqa: E402
from kernel_inputs import records_of, stored_rows  # noqa: E402

from strata_core.kernels.device.capture import capture, kernels_of  # noqa: E402
from strata_core.kernels.device.layout import STATUS_BYTES, WAVE, inner_bytes  # noqa: E402
from strata_core.kernels.device.prompt_table import multiplying, spread_of, within  # noqa: E402
from strata_core.kernels.device.table import make_launch  # noqa: E402
from strata_core.memory.address import address_of  # noqa: E402
from strata_core.runtime import Launch  # noqa: E402

TYPES = "Q4_K,Q5_K,Q6_K,Q8_0,Q4_0,Q5_1,MXFP4"
TOKENS = "512,2048,4096"
COLUMNS = "{:10} {:6} {:>6} {:>10} {:>7} {:>10} {:>7} {:>6}"
REPEATS = 5


@frozen
class Shape:
    """Sizes of a layer: inputs, inner rows, experts, experts a token, rows of the dense matrix."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    top_k: int = 8
    dense: int = 4096


class Memory:
    """Device memory by contents; all of it is given back at the end."""

    def __init__(self, runtime, device: int, stream: int) -> None:
        self.runtime, self.device, self.stream = runtime, device, stream
        self._taken: list[int] = []

    def put(self, data: np.ndarray, times: int = 1) -> int:
        """The address of `times` copies of an array, one behind the other."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        address = self.room(raw.size * times)
        for n in range(times):
            self.runtime.copy(address + n * raw.size, address_of(raw), raw.size, self.stream)
        self.runtime.synchronize(self.stream)
        return address

    def room(self, nbytes: int) -> int:
        """The address of so many bytes, contents undefined."""
        self._taken.append(self.runtime.alloc(self.device, nbytes))
        return self._taken[-1]

    def give_back(self) -> None:
        for address in self._taken:
            self.runtime.free(self.device, address)
        self._taken.clear()


def dense(memory: Memory, shape: Shape, kind: str, tokens: int) -> Callable[[bool], Launch]:
    """A launch of a dense product, on matrix units or not."""
    rng = np.random.default_rng(1)
    data = stored_rows(kind, shape.dense, shape.hidden, rng)
    x = pack_planes(records_of(rng.standard_normal((tokens, shape.hidden)).astype(np.float32)))
    args = {
        "weight": memory.put(data),
        "x": memory.put(x),
        "out": memory.room(4 * tokens * shape.dense),
        "bias": 0,
        "stride": data.shape[1],
        "tokens": tokens,
        "rows": shape.dense,
        "columns": shape.hidden,
    }
    return lambda matrix: make_launch(
        multiplying("prompt_linear", (kind,), matrix=matrix), (kind,), **args
    )


def grouped(
    memory: Memory, shape: Shape, kind: str, tokens: int
) -> Iterator[tuple[str, int, Callable[[bool], Launch]]]:
    """Launches of gate and up, and of down, of all experts of a layer; operations of each."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((tokens, shape.hidden)).astype(np.float32)
    picks = np.array([rng.permutation(shape.experts)[: shape.top_k] for _ in range(tokens)])
    counts = np.bincount(picks.ravel(), minlength=shape.experts)
    gate = stored_rows(kind, shape.inner, shape.hidden, rng)
    down = stored_rows(kind, shape.hidden, shape.inner, rng)
    wave = np.zeros(shape.experts, WAVE)
    for part, data in (("gate", gate), ("up", gate), ("down", down)):
        base = memory.put(data, shape.experts)
        wave[part] = base + np.arange(shape.experts, dtype=np.uint64) * np.uint64(data.size)
    wave["expert"] = np.arange(shape.experts)
    shared = {
        "wave": memory.put(wave),
        "starts": memory.put(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        "order": memory.put(np.argsort(picks.ravel(), kind="stable").astype(np.int32)),
        "inner": memory.room(picks.size * inner_bytes(shape.inner)),
        "experts": shape.experts,
    }
    first = shared | {
        "x": memory.put(pack_planes(records_of(x))),
        "status": memory.put(np.full(STATUS_BYTES, 0xFF, np.uint8)),
        "gate_stride": gate.shape[1],
        "up_stride": gate.shape[1],
        "top_k": shape.top_k,
        "rows": shape.inner,
        "columns": shape.hidden,
        "op": 1,
    }
    second = shared | {
        "out": memory.room(4 * picks.size * shape.hidden),
        "stride": down.shape[1],
        "rows": shape.hidden,
        "columns": shape.inner,
    }

    def launch(plain: str, types: tuple[str, ...], args: dict[str, int], matrix: bool) -> Launch:
        name = multiplying(plain, types, matrix=matrix)
        spread = spread_of(name, tokens, picks.size, shape.experts)
        return make_launch(name, types, spread=spread, **args)

    each = 2 * picks.size * shape.inner * shape.hidden
    yield "gate, up", 2 * each, lambda m: launch("prompt_gate_up", (kind,) * 3, first, m)
    yield "down", each, lambda m: launch("prompt_down", (kind,), second, m)  # what gate, up left


def microseconds(runtime, device: int, stream: int, launch: Launch, replays: int) -> float:
    """Of one launch in a replayed graph, the median of some rows of replays."""
    launch = within(launch, runtime.devices()[device].shared)
    runtime.load(device, kernels_of([launch]))
    graph, times = capture(runtime, stream, [launch] * replays), []
    try:
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            runtime.launch_graph(graph, stream)
            runtime.synchronize(stream)
            times.append((time.perf_counter() - start) / replays)
    finally:
        runtime.destroy_graph(graph)
    return float(np.median(times[1:])) * 1e6  # the first one warms up


def time_products(tested, kinds, tokens, shape: Shape, replays: int = 4) -> None:
    """Prints the table for a bench's device; without matrix units their columns stay empty."""
    runtime, device, stream = tested.runtime, tested.device, tested.stream
    variants = (False, True) if runtime.devices()[device].matrix else (False,)
    print(
        COLUMNS.format("product", "type", "tokens", "plain us", "TOP/s", "matrix us", "TOP/s", "x")
    )
    for kind in kinds:
        for count in tokens:
            memory = Memory(runtime, device, stream)
            try:
                operations = 2 * count * shape.dense * shape.hidden
                rows = [
                    *grouped(memory, shape, kind, count),
                    ("dense", operations, dense(memory, shape, kind, count)),
                ]
                for name, work, make in rows:
                    us = [microseconds(runtime, device, stream, make(v), replays) for v in variants]
                    cells = [f for t in us for f in (f"{t:.1f}", f"{work / t / 1e6:.1f}")]
                    cells += [f"{us[0] / us[1]:.2f}"] if len(us) > 1 else ["-"] * 3
                    print(COLUMNS.format(name, kind, count, *cells), flush=True)
            finally:
                memory.give_back()


def main() -> int:
    """Parse and run."""
    from check_kernels import device, oracle

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--types", default=TYPES)
    options.add_argument("--tokens", default=TOKENS)
    options.add_argument("--on", choices=("cuda", "sim"), default="cuda")
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    asked = options.parse_args()
    on_sim = asked.on == "sim"
    tested = oracle(asked.cache) if on_sim else device(asked.cache, 0)
    shape = Shape(256, 256, 4, 2, 64) if on_sim else Shape()
    try:
        counts = [int(count) for count in asked.tokens.split(",")]
        time_products(tested, asked.types.split(","), counts, shape)
    finally:
        tested.runtime.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
