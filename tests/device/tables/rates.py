"""Bandwidths of this machine, in GB/s, as a line of JSON; `bandwidth.py` explains the programs.

    python tests/device/tables/rates.py device|host

`host` has no device: what is read from memory stands for all lanes, so that a table can be tried.
`int8_tops` and `fp16_tflops` are those of PyTorch's products of 8192 x 8192, null without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

SIZE = 8192
REPEATS = 8


def host() -> dict[str, Any]:
    """The best of a few sums over memory."""
    memory = np.ones(32 << 20, np.uint8).view(np.uint64)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        int(memory.sum())
        best = max(best, memory.nbytes / (time.perf_counter() - began) / 1e9)
    lanes = dict.fromkeys(("vram", "link", "cpu", "link_beside", "cpu_beside"), best)
    return {**lanes, "int8_tops": None, "fp16_tflops": None}


def device() -> dict[str, Any]:
    """Copies within the device (bytes read and written), over the link, and reads by threads."""
    import bandwidth
    import cupy
    import lab
    from oracle import random_rows

    reads = bandwidth.build_lane()
    layer = lab.Module("layer.cu")
    count = (2 << 30) // bandwidth.BLOB
    arena, alias = bandwidth.mapped(count * bandwidth.BLOB)
    rows = random_rows("Q4K", bandwidth.BLOB // 144, 256, np.random.default_rng(0))
    bandwidth.fill(arena, rows.reshape(-1))
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    alone = bandwidth.run_reads(reads, arena, threads)
    with bandwidth.Link("copies", alias, arena.size, layer) as link:
        time.sleep(0.6)
        link_alone = link.rate()
    with bandwidth.Link("copies", alias, arena.size, layer) as link:
        beside = bandwidth.run_reads(reads, arena, threads)
        link_beside = link.rate()
    a, b = cupy.empty(2 << 30, cupy.uint8), cupy.ones(2 << 30, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    times = lab.event_times(stream, lambda: cupy.copyto(a, b), REPEATS)[1:]
    return {
        "vram": 2 * a.nbytes / float(np.median(times)) / 1e6,
        "link": link_alone,
        "cpu": alone,
        "link_beside": link_beside,
        "cpu_beside": beside,
        **products(),
    }


def products() -> dict[str, float | None]:
    """Rates of the matrix units, by PyTorch."""
    try:
        import torch
    except ImportError:
        return {"int8_tops": None, "fp16_tflops": None}

    def rate(a: Any, b: Any, product: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            product(a, b)
        begin.record()
        for _ in range(REPEATS):
            product(a, b)
        end.record()
        end.synchronize()
        return 2.0 * SIZE**3 * REPEATS / begin.elapsed_time(end) / 1e9

    whole = torch.randint(-127, 128, (2, SIZE, SIZE), dtype=torch.int8, device="cuda")
    halves = torch.randn((2, SIZE, SIZE), dtype=torch.float16, device="cuda")
    return {
        "int8_tops": rate(whole[0], whole[1].t(), torch._int_mm),
        "fp16_tflops": rate(halves[0], halves[1], torch.matmul),
    }


if __name__ == "__main__":
    print(json.dumps({"device": device, "host": host}[sys.argv[1]]()))
