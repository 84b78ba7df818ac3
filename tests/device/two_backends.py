"""Two backends side by side in one process: equal tokens and logits, and decode speed in turn.

    python tests/device/two_backends.py FOLDER [--backends cuda hip] [--seconds 80] [--speed MODEL]

FOLDER holds kjv-moe/ and tiny/. One model decodes on both in turn: medians and their ratio, the
second over the first. Then for each model the CPU computes the hashes that are expected; a line for
each way of placing experts says whether both backends give them. Nothing is begun after --seconds:
what is left out is counted, and then, as where a hash differs or the ratio is below 0.95, it leaves
with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

import strata_core  # noqa: E402
from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.config import resolve_arguments  # noqa: E402
from strata_core.engine.messages import Finished  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402
from strata_core.verify.identity import prompts_of, prove, subject  # noqa: E402
from strata_core.verify.ways import ways  # noqa: E402

KJV = ("kjv-Q4_K_M.gguf", "kjv-Q8_0.gguf", "kjv-Q4_0.gguf", "kjv-MXFP4.gguf", "")
TINY = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")
WAYS = (
    "arena, cache half", "path 1, cache half", "path 3, cache half", "arena, cache 0",
    "arena, cache all",
)  # fmt: skip
"""Of the ways that `strata verify` knows."""

TURNS, TOKENS = 7, 200
LOWEST = 0.95


def models_of(folder: Path) -> list[Path]:
    """The models, both kinds in turn so that a short run sees them; "" is the hub's folder."""
    kjv = [folder / "kjv-moe" / name for name in KJV]
    tiny = [folder / "tiny" / name for name in TINY]
    mixed = [model for pair in zip(kjv, tiny, strict=False) for model in pair]
    return [*mixed, *kjv[len(tiny) :]]


@frozen
class Cell:
    """What came of a way on a backend: a verdict in a word, the hash of the first logits, why."""

    verdict: str
    logits: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.verdict == "equal":
            return self.verdict
        return f"{self.verdict.upper()} {self.note[:90]}".rstrip()


LATE = "the time was over"


def cells(model: Path, backend: str, until: float) -> dict[str, Cell]:
    """By way what came of it, against the CPU's run."""
    left = until - time.monotonic()
    if left <= 0:
        return dict.fromkeys(WAYS, Cell("skipped", note=LATE))
    try:
        found = subject(model, model, resolve_arguments({"backend": backend}))
        table = ways(found.facts, devices=found.devices, given={"backend": backend})
        _, rows = prove(found, [way for way in table if str(way) in WAYS], seconds=left)
    except StrataError as problem:
        late = time.monotonic() > until
        note = LATE if late else " ".join(str(problem).split())
        return dict.fromkeys(WAYS, Cell("skipped" if late else "failed", note=note))
    return {str(row.way): Cell(row.verdict, row.logits[:16], row.note) for row in rows}


def identity(models: Sequence[Path], backends: Sequence[str], until: float) -> tuple[int, int]:
    """Print the table; the ways that are not equal on both, and those that were not reached."""
    different = left = 0
    for model in models:
        begin = time.monotonic()
        found = {backend: cells(model, backend, until) for backend in backends}
        name = f"{model.parent.name}/{model.name}" if model.suffix else model.name
        for way in WAYS:
            row = [found[backend].get(way, Cell("missing")) for backend in backends]
            verdicts = {cell.verdict for cell in row}
            logits = sorted({cell.logits for cell in row})
            if "skipped" in verdicts:
                left += 1
            elif not verdicts <= {"equal", "idle"} or len(logits) > 1:
                different += 1
            told = ", ".join(f"{b} {cell}" for b, cell in zip(backends, row, strict=True))
            print(f"{name:24} {way:19} {'/'.join(logits):16} {told}", flush=True)
        print(f"{name:24} in {time.monotonic() - begin:.1f} s", flush=True)
    return different, left


def speed(model: Path, backends: Sequence[str], until: float) -> float | None:
    """Decode in turn, both loaded; the second's median over the first's, None if not reached."""
    if time.monotonic() > until:
        return None
    hyper = open_checkpoint(model).hyper
    (ids, *_) = (prompt.ids for prompt in prompts_of(hyper.vocabulary, hyper.context))
    rates: dict[str, list[float]] = {backend: [] for backend in backends}
    with ExitStack() as stack:
        loaded = {b: stack.enter_context(strata_core.load(model, backend=b)) for b in backends}
        for turn in range(TURNS + 1):
            for backend, running in loaded.items():
                events = running.generate(list(ids), max_tokens=TOKENS, ignore_eos=True)
                (done,) = [event for event in events if isinstance(event, Finished)]
                if turn:  # the first warms up
                    rates[backend].append((len(done.token_ids) - 1) / done.decode_s)
    medians = [statistics.median(rates[backend]) for backend in backends]
    for backend, median in zip(backends, medians, strict=True):
        low, high = min(rates[backend]), max(rates[backend])
        print(f"decode {backend}: {median:.1f} tok/s ({low:.1f} to {high:.1f}, {TURNS} turns)")
    return medians[1] / medians[0]


def main() -> int:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backends", nargs=2, default=["cuda", "hip"])
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--speed", type=Path, help="the model that decodes in turn")
    parser.add_argument("--models", nargs="*", type=Path, help="instead of the folder's")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    models = asked.models or models_of(asked.folder)
    ratio = speed(asked.speed or models[0], asked.backends, until)
    different, left = identity(models, asked.backends, until)
    names = " and ".join(asked.backends)
    print(f"{names}: {len(models) * len(WAYS) - left} ways, {different} differ, {left} not reached")
    first, second = asked.backends
    told = "not reached" if ratio is None else f"{ratio:.3f}"
    print(f"decode {second} over {first}: {told}")
    return 1 if different or left or ratio is None or ratio < LOWEST else 0


if __name__ == "__main__":
    sys.exit(main())
