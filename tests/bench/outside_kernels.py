"""Where the time of a decode round goes: inside kernels, and outside of them.

    python tests/bench/outside_kernels.py MODEL.gguf [MODEL.gguf ...] [--layers 48]

Each model decodes random ids with the cpu backend. A round's time, as whoever asked for it sees it,
falls into `kernels` (from handing the round's phases to the pool until every thread is done, waits
between threads included), `window` (what the executor does before and after that), `sampler`, and
`engine` (all the rest: the loop, messages, text, and the threads' taking turns). The share is what
is not kernels. With models of the same shape but different numbers of layers, a straight line
through them tells the share at `--layers`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from attrs import asdict, frozen

import strata_core

PARTS = ("kernels", "window", "sampler", "engine")


@frozen
class Row:
    """Milliseconds of a round of one model, by part; medians over the repeats."""

    model: str
    layers: int
    threads: int
    kernels: float
    window: float
    sampler: float
    engine: float

    @property
    def outside(self) -> float:
        """Milliseconds that are not kernels."""
        return self.window + self.sampler + self.engine

    @property
    def share(self) -> float:
        """The part of a round that is outside of kernels."""
        return self.outside / (self.outside + self.kernels)


class Stopwatch:
    """Adds up the seconds that wrapped calls take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed under a name."""
        self.seconds[name] = 0.0

        def timed(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def clear(self) -> None:
        """Start again from 0."""
        for name in self.seconds:
            self.seconds[name] = 0.0


def measure(path: str, rounds: int, repeats: int, options: dict[str, Any]) -> Row:
    """Load a model, decode, and split the time of a round."""
    with strata_core.load(path, backend="cpu", max_context=rounds + 1, **options) as model:
        engine, executor = model._running.engine, model._running.executor
        watch = Stopwatch()
        executor._pool.run = watch.wrapped("kernels", executor._pool.run)
        executor.run = watch.wrapped("executor", executor.run)
        engine.sampler = watch.wrapped("sampler", engine.sampler)
        numbers = np.random.default_rng(0)
        found = []
        for _ in range(repeats + 1):
            ids = [int(i) for i in numbers.integers(model.checkpoint.hyper.vocabulary, size=rounds)]
            watch.clear()
            start = time.perf_counter()
            events = model.generate(
                ids[:1], max_tokens=rounds, ignore_eos=True, continuation=ids[1:]
            )
            for _event in events:
                pass
            found.append({"all": time.perf_counter() - start, **watch.seconds})
        # the first run is not counted: it brings weights and kernels to where they are used
        per_round = {
            name: median(run[name] for run in found[1:]) / rounds * 1e3 for name in found[0]
        }
        return Row(
            model=Path(path).name,
            layers=model.checkpoint.hyper.layers,
            threads=model.capabilities.threads or 0,
            kernels=per_round["kernels"],
            window=per_round["executor"] - per_round["kernels"],
            sampler=per_round["sampler"],
            engine=per_round["all"] - per_round["executor"] - per_round["sampler"],
        )


def extended(rows: Sequence[Row], layers: int) -> Row:
    """The row of a model of so many layers, each part on a straight line through those measured."""
    at = [row.layers for row in rows]
    parts = {
        part: float(np.polyval(np.polyfit(at, [getattr(row, part) for row in rows], 1), layers))
        for part in PARTS
    }
    return Row(model="(by a line)", layers=layers, threads=rows[0].threads, **parts)


def shown(row: Row) -> str:
    """A line of the table."""
    parts = "".join(f"{getattr(row, part):>10.3f}" for part in PARTS)
    return f"{row.model:<24}{row.layers:>7}{row.threads:>8}{parts}{row.share:>10.2%}"


def main() -> None:
    """Measure every model, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("-n", "--rounds", type=int, default=64, help="rounds of a run (64)")
    parser.add_argument("-r", "--repeats", type=int, default=3, help="runs that count (3)")
    parser.add_argument("-t", "--threads", type=int, help="default: what the backend finds best")
    parser.add_argument("--source", default="auto", help="arena or mmap (auto)")
    parser.add_argument("--layers", type=int, help="show the share at this number of layers too")
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")
    given = parser.parse_args()
    options = {"source": given.source, "threads": given.threads}
    print(
        f"{'model':<24}{'layers':>7}{'threads':>8}{''.join(f'{p:>10}' for p in PARTS)}{'share':>10}"
    )
    rows = []
    for path in given.models:
        rows.append(measure(path, given.rounds, given.repeats, options))
        print(shown(rows[-1]), flush=True)
    if given.layers and len({row.layers for row in rows}) > 1:
        rows.append(extended(rows, given.layers))
        print(shown(rows[-1]))
    if given.json:
        document = [{**asdict(row), "share": row.share} for row in rows]
        Path(given.json).write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
