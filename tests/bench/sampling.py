"""How long a token's drawing takes: `python tests/bench/sampling.py [--vocabulary 151936]`.

The compiled sampler beside the plain one, on the same random scores; milliseconds, medians.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from strata_core.interfaces import BackendContext
from strata_core.machine import read_machine
from strata_core.sampler import Sampler, Sampling, open_sampler, sample

SETTINGS = {
    "greedy": Sampling(),
    "temperature 0.8": Sampling(temperature=0.8),
    "and top-k 40": Sampling(temperature=0.8, top_k=40),
    "and top-p 0.95": Sampling(temperature=0.8, top_k=40, top_p=0.95),
    "and min-p 0.05": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top-p 0.95 alone": Sampling(temperature=0.8, top_p=0.95),
    "penalty 1.1": Sampling(temperature=0.8, repetition_penalty=1.1),
}


def milliseconds(draw: Sampler, sampling: Sampling, scores: np.ndarray, repeats: int) -> float:
    """The median of some draws after the first."""
    history = list(range(200))
    taken = []
    for position in range(repeats + 1):
        start = time.perf_counter()
        draw(scores, sampling, history, position)
        taken.append(time.perf_counter() - start)
    return median(taken[1:]) * 1e3


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="scores (151936)")
    parser.add_argument("-r", "--repeats", type=int, default=30, help="draws that count (30)")
    given = parser.parse_args()
    scores = np.random.default_rng(0).standard_normal(given.vocabulary).astype(np.float32) * 4
    context = BackendContext(machine=read_machine(), options={}, degrade=print)
    compiled = open_sampler(context)
    print(f"{'':<20}{'compiled ms':>12}{'plain ms':>12}")
    for name, sampling in SETTINGS.items():
        pair = [milliseconds(draw, sampling, scores, given.repeats) for draw in (compiled, sample)]
        print(f"{name:<20}" + "".join(f"{ms:>12.3f}" for ms in pair), flush=True)


if __name__ == "__main__":
    main()
