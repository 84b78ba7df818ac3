"""The Python of a device's decode rounds: `python tests/bench/device_rounds.py [--touch 4]`.

A made-up model is bound to the simulated accelerator, and `DeviceExecutor.run` gets windows of one
token. What devices and the pool would do in a round is left out: instead `--touch` MiB of memory
are read and written, so that code and data are as cold as beside a real round. Experts do not
change places, and with `--misses` each layer has work for the CPU, so that rounds are looked at to
correct the split. Microseconds a round: the median, and the mean without the longest thirtieth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from attrs import evolve

import strata_core
from strata_core.interfaces import Window
from strata_core.kernels.device.correcting import Correction
from strata_core.kernels.device.split import Lane
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

CPU = Lane(10e-6, 70e9)
BLOB = 2_650_000


def window(position: int, slot: int) -> Window:
    """One token."""
    ids, positions, slots = (np.array([n], np.int32) for n in (position, position, slot))
    return Window(ids, positions, slots, np.zeros(1, np.int32), "window")


def see_misses(executor: Any, count: int) -> None:
    """Have every layer say that so many experts fell to the CPU, and took what they should."""
    maker = executor._maker
    host, ticks = maker.host, maker.hand.ticks
    maker.split = evolve(maker.split, link=Lane(8e-6, 43e9), cpu=CPU)
    host.counts[:] = count, 1
    host.stamps[:] = 0, int(CPU.seconds(count * BLOB) * ticks)
    executor._correction = Correction(host.stamps, host.counts, ticks, BLOB, count)


def measure(executor: Any, rounds: int, touched: int) -> list[float]:
    """Seconds of each run, without those of its round."""
    memory = np.zeros(touched << 20, np.uint8)
    inside = 0.0

    def nothing(_: object) -> None:
        nonlocal inside
        began = time.perf_counter()
        memory[::64] += 1
        inside = time.perf_counter() - began

    slot = executor.open_sequence()
    windows = [window(position, slot) for position in range(256)]
    executor.run(windows[0])
    executor._run_round = nothing
    taken = []
    for number in range(rounds):
        given = windows[number % len(windows)]
        began = time.perf_counter()
        executor.run(given)
        taken.append(time.perf_counter() - began - inside)
    del executor._run_round
    return taken[rounds // 10 :]


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="layers with experts (12)")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="logits (32000)")
    parser.add_argument("--misses", type=int, default=0, help="experts of a layer for the CPU (0)")
    parser.add_argument("--touch", type=int, default=4, help="MiB that a round touches (4)")
    parser.add_argument("-n", "--rounds", type=int, default=3000, help="rounds (3000)")
    given = parser.parse_args()
    hyper = tiny_hyper(layers=given.layers, vocabulary=given.vocabulary, top_k=given.top_k)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_gguf(path, hyper=hyper)
        options = {"backend": "sim", "threads": 1, "adapt_every": 0}
        cache = 0 if given.misses else given.layers * hyper.experts
        with strata_core.load(str(path), expert_cache=cache, learn=False, **options) as model:
            executor: Any = model._running.executor
            if given.misses:
                see_misses(executor, given.misses)
            taken = sorted(measure(executor, given.rounds, given.touch))
    most = taken[: len(taken) * 29 // 30]
    print(f"median {median(taken) * 1e6:.1f}, mean {fmean(most) * 1e6:.1f} us a round")


if __name__ == "__main__":
    main()
