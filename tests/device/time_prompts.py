"""Attention of prompts: bits against the CPU's steps, then times of chunks at positions up to 32K.

On a device with matrix units both kernels are timed, that of section 9's order ("plain") and that
of its own ("matrix"), which is compared as `check_kernels.py` does.

The shape is 30B-A3B's unless said: 32 heads of 128 that share 4 KV heads. A row is one launch: so
many tokens of one sequence from a position on. TFLOP/s count a multiply and an add for each
element, of scores and of the weighted sum, of each position that a token sees. "48 layers" is what
a chunk takes of a prompt; the last lines are whole prompts, added up from chunks like theirs.

Leaves with 1 where bits differ.

Run: python tests/device/time_prompts.py [--kv fp16 int8] [--chunk 2048] [--longest 32768]
     [--heads 32 --kv-heads 4 --head-dim 128] [--on cuda|sim] [--no-bits] [--cache FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "tests/device_sources")]
sys.path[:0] = [str(Path(__file__).resolve().parent)]

from check_kernels import check, device, oracle  # noqa: E402
from kernel_bench import Bench  # noqa: E402
from matrix_attention_cases import matrix_attention_cases  # noqa: E402
from prompt_cases import prompt_attention_cases  # noqa: E402

from strata_core.kernels.device.prompt_table import attending  # noqa: E402
from strata_core.kernels.device.table import make_launch  # noqa: E402
from strata_core.memory.address import address_of  # noqa: E402
from strata_core.runtime import KernelKey  # noqa: E402

LAYERS, REPEATS = 48, 5
PLAIN = "prompt_attention"
ENOUGH_SECONDS = 0.05


class Chunks:
    """Launches of chunks on random queries, keys and values of one layer, freed at the end."""

    def __init__(self, bench: Bench, asked: argparse.Namespace, kv: str, name: str) -> None:
        self.runtime, self.device, self.stream = bench.runtime, bench.device, bench.stream
        self.asked, self.kv, self.taken = asked, kv, []
        self.label = f"{kv:5} {'plain' if name == PLAIN else 'matrix':6}"
        self.width = asked.kv_heads * asked.head_dim
        self.key = KernelKey(name, (kv, asked.head_dim))
        rng = np.random.default_rng(1)
        shape = (asked.chunk, asked.heads, asked.head_dim)
        self.q = self._put(rng.standard_normal(shape, np.float32))
        self.out = self._put(np.zeros(shape, np.float32))
        self.positions = self._put(np.zeros(asked.chunk, np.int32))
        self.places = self._put(self._kept(rng))
        self.runtime.load(self.device, [self.key])

    def _kept(self, rng: np.random.Generator) -> np.ndarray:
        """Keys and values of `longest` positions; the places of all tokens."""
        rows = (self.asked.longest, self.width)
        fields = np.zeros(4, np.uint64)
        for at in range(2):
            data = rng.standard_normal(rows, np.float32)
            if self.kv == "int8":
                fields[at] = self._put((data * 30).clip(-127, 127).astype(np.int8))
                scales = np.full((rows[0], self.width // 32), 1 / 30, np.float16)
                fields[2 + at] = self._put(scales)
            else:
                fields[at] = self._put(data.astype(np.float16 if self.kv == "fp16" else data.dtype))
        return np.tile(fields, (self.asked.chunk, 1))

    def _put(self, data: np.ndarray) -> int:
        address = self.runtime.alloc(self.device, data.nbytes)
        self.taken.append(address)
        self._copy(address, data)
        return address

    def _copy(self, address: int, data: np.ndarray) -> None:
        self.runtime.copy(address, address_of(data), data.nbytes, self.stream)
        self.runtime.synchronize(self.stream)

    def seconds(self, tokens: int, position: int) -> float:
        """The median of some rows of launches, each long enough for the host's clock."""
        self._copy(self.positions, np.arange(position, position + tokens, dtype=np.int32))
        launch = make_launch(
            self.key.name,
            self.key.parameters,
            q=self.q,
            out=self.out,
            positions=self.positions,
            places=self.places,
            layer_offset=0,
            tokens=tokens,
            width=self.width,
            kv_heads=self.asked.kv_heads,
            group=self.asked.heads // self.asked.kv_heads,
            window=0,
        )
        once = self._row(launch, 1)  # warms up
        count = max(1, min(100, int(ENOUGH_SECONDS / once)))
        return float(np.median([self._row(launch, count) for _ in range(REPEATS)]))

    def _row(self, launch, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self.runtime.launch(launch, self.stream)
        self.runtime.synchronize(self.stream)
        return (time.perf_counter() - start) / count

    def close(self) -> None:
        """Free what was taken."""
        for address in self.taken:
            self.runtime.free(self.device, address)


def operations(tokens: int, position: int, heads: int, head_dim: int) -> int:
    """Multiplies and adds of a chunk: of scores and of the weighted sum."""
    seen = tokens * position + tokens * (tokens + 1) // 2
    return 4 * seen * heads * head_dim


def rows(chunk: int, longest: int) -> Iterator[tuple[int, int]]:
    """(tokens, position) to time: small and whole chunks at the beginning, later, at the end."""
    for tokens in sorted({max(chunk // 16, 1), max(chunk // 4, 1), chunk}):
        for share in (0, 8, 2, 1):
            position = longest // share - tokens if share else 0
            if position >= 0:
                yield tokens, position


def times(chunks: Chunks, asked: argparse.Namespace) -> None:
    """The table of one KV type, and prompts of many chunks."""
    heads = f"{'tokens':>6} {'position':>8} {'ms':>9} {'TFLOP/s':>8} {'48 layers s':>11}"
    print(f"{'KV':5} {'order':6} {heads}")
    for tokens, position in dict.fromkeys(rows(asked.chunk, asked.longest)):
        spent = chunks.seconds(tokens, position)
        done = operations(tokens, position, asked.heads, asked.head_dim)
        print(
            f"{chunks.label} {tokens:6} {position:8} {spent * 1e3:9.3f} {done / spent / 1e12:8.2f} "
            f"{LAYERS * spent:11.4f}",
            flush=True,
        )
    length, total = 0, 0.0
    marks = {asked.longest // n for n in (8, 4, 2, 1)}
    while length + asked.chunk <= asked.longest:
        total += chunks.seconds(asked.chunk, length)
        length += asked.chunk
        if length in marks:
            rate = operations(length, 0, asked.heads, asked.head_dim) / total / 1e12
            print(
                f"{chunks.label} a prompt of {length} in chunks of {asked.chunk}: "
                f"{LAYERS * total:.3f} s in {LAYERS} layers, {rate:.2f} TFLOP/s",
                flush=True,
            )


def kernels(bench: Bench, asked: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(KV type, kernel): that of section 9's order, and what takes its place on the device."""
    matrix = bench.runtime.devices()[bench.device].matrix
    for kv in asked.kv:
        names = (PLAIN, attending(kv, asked.head_dim, matrix=matrix))
        yield from ((kv, name) for name in dict.fromkeys(names))


def attention(asked: argparse.Namespace) -> int:
    """Bits of each KV type and kernel, then its times; how many kernels differ."""
    bench = oracle(asked.cache) if asked.on == "sim" else device(asked.cache, 0)
    wrong = 0
    try:
        for kv, name in kernels(bench, asked):
            if not asked.no_bits:
                made = prompt_attention_cases if name == PLAIN else matrix_attention_cases
                cases = list(made(kv, asked.head_dim))
                bench.runtime.load(bench.device, [case.key for case in cases])
                wrong += check(cases, oracle(asked.cache), bench)
            chunks = Chunks(bench, asked, kv, name)
            try:
                times(chunks, asked)
            finally:
                chunks.close()
    finally:
        bench.runtime.close()
    return wrong


def options() -> argparse.ArgumentParser:
    """What may be asked."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument(
        "--kv", nargs="+", choices=("fp32", "fp16", "int8"), default=["fp16", "int8"]
    )
    found.add_argument("--chunk", type=int, default=2048)
    found.add_argument("--longest", type=int, default=32768)
    found.add_argument("--heads", type=int, default=32)
    found.add_argument("--kv-heads", type=int, default=4)
    found.add_argument("--head-dim", type=int, default=128)
    found.add_argument("--on", choices=("cuda", "sim"), default="cuda")
    found.add_argument("--no-bits", action="store_true")
    found.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    return found


if __name__ == "__main__":
    sys.exit(1 if attention(options().parse_args()) else 0)
