"""What Python does between two decode rounds: `python tests/bench/between_rounds.py [--touch 4]`.

The engine, the compiled sampler and the demo's tokenizer run as they do in use, beside an executor
that computes nothing: it returns the same logits, after it has touched `--touch` MiB of memory, so
that code and data of the others are as cold as beside a real round. A thread waits for the events.
Microseconds, medians: `between` is from the end of a run to the begin of the next, without further
clocks; the parts are of a second request, with clocks around them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.api import DEMO, model_path
from strata_core.checkpoint.open import open_checkpoint
from strata_core.engine import loop
from strata_core.engine.messages import Event, Failed, Finished, Shutdown, Submit
from strata_core.engine.request import Request
from strata_core.interfaces import BackendContext, Limits, Window
from strata_core.machine import read_machine
from strata_core.sampler import open_sampler
from strata_core.testing.arithmetic_executor import ArithmeticExecutor
from strata_core.tokenizer import open_tokenizer

SKIPPED = 10
"""Rounds at the begin that do not count."""

Spans = dict[str, list[tuple[int, int]]]


class Idle(ArithmeticExecutor):
    """The same logits for every window; `spans` says when runs, and what else is timed, took place.

    The likeliest tokens are ones that stand for text.
    """

    def __init__(self, vocabulary: int, touched: int) -> None:
        super().__init__()
        rows = np.random.default_rng(0).standard_normal((1, vocabulary)) * 4
        rows[0, 500] = 99
        self.rows = rows.astype(np.float32)
        self.memory = np.zeros(touched << 20, np.uint8)
        self.spans: Spans = {}

    def run(self, window: Window) -> NDArray[np.float32]:
        """What a device would do meanwhile: something else."""
        begin = time.perf_counter_ns()
        self.memory[::64] += 1
        self.note("run", begin)
        return self.rows[: len(window.logits_rows)]

    def note(self, name: str, begin: int) -> None:
        """Something that is timed is over."""
        self.spans.setdefault(name, []).append((begin, time.perf_counter_ns()))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that notes when it was called."""

        def noting(*args: Any) -> Any:
            begin = time.perf_counter_ns()
            result = call(*args)
            self.note(name, begin)
            return result

        return noting


def run(engine: loop.Engine, executor: Idle, tokens: int) -> Spans:
    """One request; what was noted in its decode rounds that count."""
    executor.spans = {}
    events: SimpleQueue[Event] = SimpleQueue()
    engine.send(Submit(request="a", prompt=(5,), max_tokens=tokens, ignore_eos=True), events.put)
    while not isinstance(event := events.get(), Finished | Failed):
        pass
    if isinstance(event, Failed):
        raise SystemExit(f"{event.what}: {event.why}")
    return {name: spans[SKIPPED:] for name, spans in executor.spans.items()}


def microseconds(begins: list[int], ends: list[int]) -> float:
    """The median of the times from begins to ends."""
    return median(end - begin for begin, end in zip(begins, ends, strict=True)) / 1e3


def parts(spans: Spans) -> dict[str, float]:
    """Medians by part of a round; the first draw belongs to the prompt as the first step does."""
    (steps, step_ends), (runs, run_ends), (draws, draw_ends) = (
        tuple(map(list, zip(*spans[name], strict=True))) for name in ("step", "run", "draw")
    )
    return {
        "step to run": microseconds(steps, runs),
        "run to step's end": microseconds(run_ends, step_ends),
        "to draw": microseconds(step_ends, draws),
        "draw": microseconds(draws, draw_ends),
        "to next step": microseconds(draw_ends[:-1], steps[1:]),
    }


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=32_000, help="scores (32000)")
    parser.add_argument("--touch", type=int, default=4, help="MiB that a round touches (4)")
    parser.add_argument("-n", "--tokens", type=int, default=500, help="tokens of a request (500)")
    given = parser.parse_args()
    executor = Idle(given.vocabulary, given.touch)
    context = BackendContext(machine=read_machine(), options={}, degrade=print)
    engine = loop.Engine(
        executor=executor,
        limits=Limits(tokens=64, logits=1, context=given.tokens + 1, kv_type="fp32"),
        vocabulary=given.vocabulary,
        eos=frozenset(),
        tokenizer=open_tokenizer(open_checkpoint(model_path(DEMO))),
        sampler=open_sampler(context),
    )
    engine.start()
    spans = run(engine, executor, given.tokens)["run"]
    between = median(after[0] - before[1] for before, after in pairwise(spans)) / 1e3
    loop.step = executor.timed("step", loop.step)
    Request._draw = executor.timed("draw", Request._draw)
    print(f"{'between':<20}{between:>8.1f}")
    for name, taken in parts(run(engine, executor, given.tokens)).items():
        print(f"{name:<20}{taken:>8.1f}")
    engine.send(Shutdown(), lambda _: None)
    engine.join()


if __name__ == "__main__":
    main()
