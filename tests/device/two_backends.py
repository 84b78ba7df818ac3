"""Two backends side by side in one process: equal tokens and logits, and decode speed in turn.

    python tests/device/two_backends.py FOLDER [--backends cuda hip] [--seconds 80] [--speed MODEL]
        [--alike] [--models MODEL ...]

FOLDER holds kjv-moe/ and tiny/: five variants of the one, four architectures of the other, unless
--models names others. One model decodes on both in turn: medians and their ratio, the second over
the first. With --alike it decodes a third time, on `cuda` without early starts, which HIP does not
have: that ratio is of like with like and has to be 0.95 or more, and the plain one is shown beside.
Then for each model the CPU computes the hashes that are expected; a line for each way of placing
experts says whether both backends give them. Long prompts in an order of a backend's own are
compared between its own ways; between the backends only where both have such an order for them, and
a line says which do. Nothing is begun after --seconds: what is left out is counted, and then, as
where a hash differs or the ratio is below 0.95, it leaves with 1. Models of FOLDER that are not
there are named and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from attrs import field, frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

from reference_models import kjv, there, tiny  # noqa: E402

import strata_core  # noqa: E402
from strata_core.api import Model  # noqa: E402
from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.config import resolve_arguments  # noqa: E402
from strata_core.engine.messages import Finished  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402
from strata_core.verify.answers import Answer, prompts_of  # noqa: E402
from strata_core.verify.identity import Outcome, prove, subject  # noqa: E402
from strata_core.verify.ways import ways  # noqa: E402

WAYS = (
    "arena, cache half", "path 1, cache half", "path 3, cache half", "arena, cache 0",
    "arena, cache all",
)  # fmt: skip
"""Of the ways that `strata verify` knows."""

TURNS, TOKENS = 7, 200
LOWEST = 0.95

ALIKE = "cuda without early starts"
NEVER = 10**6
"""A compute capability that no device has."""


@frozen
class Ratios:
    """The second backend's rate over the first's, and over the first's without early starts."""

    plain: float
    alike: float | None

    @property
    def counts(self) -> float:
        """The one that has to be high enough."""
        return self.plain if self.alike is None else self.alike


def models_of(folder: Path) -> list[Path]:
    """The models, both kinds in turn so that a short run sees them."""
    large, small = kjv(folder), tiny(folder)
    mixed = [model for pair in zip(large, small, strict=False) for model in pair]
    return [*mixed, *large[len(small) :]]


@frozen
class Cell:
    """What came of a way on a backend: a verdict in a word, the hash of the first logits, why.

    `own_order` are the answers to prompts that it sums in an order of its own.
    """

    verdict: str
    logits: str = ""
    note: str = ""
    own_order: Mapping[str, Answer] = field(factory=dict)

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
    return {str(row.way): _cell(row) for row in rows}


def _cell(row: Outcome) -> Cell:
    own = {name: row.run.answers[name] for name in row.run.own_order} if row.run else {}
    return Cell(row.verdict, row.logits[:16], row.note, own)


def differ(row: Sequence[Cell]) -> list[str]:
    """In what the backends differ: the first logits, or prompts that all sum in their own order."""
    found = ["the first logits"] if len({cell.logits for cell in row}) > 1 else []
    shared = set.intersection(*({*cell.own_order} for cell in row))
    return found + sorted(n for n in shared if len({cell.own_order[n] for cell in row}) > 1)


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
            told = ", ".join(f"{b} {cell}" for b, cell in zip(backends, row, strict=True))
            if "skipped" in verdicts:
                left += 1
            elif apart := differ(row):
                different += 1
                told += f", APART in {', '.join(apart)}"
            elif not verdicts <= {"equal", "idle"}:
                different += 1
            print(f"{name:24} {way:19} {'/'.join(logits):16} {told}", flush=True)
        own = [b for b in backends if any(cell.own_order for cell in found[b].values())]
        orders = f"; prompts in an order of its own: {', '.join(own)}" if own else ""
        print(f"{name:24} in {time.monotonic() - begin:.1f} s{orders}", flush=True)
    return different, left


@contextmanager
def no_early_starts() -> Iterator[None]:
    """While this runs, kernels that the CUDA plugin loads are of a device that cannot."""
    with patch("strata_cuda.runtime.FIRST", NEVER):
        yield


def decode_rate(running: Model, ids: Sequence[int]) -> float:
    """Tokens a second of one run."""
    events = running.generate(list(ids), max_tokens=TOKENS, ignore_eos=True)
    (done,) = [event for event in events if isinstance(event, Finished)]
    return (len(done.token_ids) - 1) / done.decode_s


def speed(model: Path, backends: Sequence[str], until: float, *, alike: bool) -> Ratios | None:
    """Decode in turn, all loaded; None if not reached."""
    if time.monotonic() > until:
        return None
    checkpoint = open_checkpoint(model)
    hyper = checkpoint.hyper
    checkpoint.close()
    (ids, *_) = (prompt.ids for prompt in prompts_of(hyper.vocabulary, hyper.context))
    names = [*backends, *([ALIKE] if alike else [])]
    rates: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        loaded = {}
        for name in names:
            with no_early_starts() if name == ALIKE else nullcontext():
                made = strata_core.load(model, backend=backends[0] if name == ALIKE else name)
                loaded[name] = stack.enter_context(made)
                decode_rate(loaded[name], ids)  # loads every kernel that it needs, and warms up
        for _ in range(TURNS):
            for name, running in loaded.items():
                rates[name].append(decode_rate(running, ids))
    medians = {name: statistics.median(rates[name]) for name in names}
    for name, median in medians.items():
        low, high = min(rates[name]), max(rates[name])
        print(f"decode {name}: {median:.1f} tok/s ({low:.1f} to {high:.1f}, {TURNS} turns)")
    first, second = (medians[backend] for backend in backends)
    return Ratios(second / first, second / medians[ALIKE] if alike else None)


def main() -> int:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backends", nargs=2, default=["cuda", "hip"])
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--speed", type=Path, help="the model that decodes in turn")
    parser.add_argument("--alike", action="store_true", help="decode without early starts too")
    parser.add_argument("--models", nargs="*", type=Path, help="instead of the folder's")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    models, left_out = (asked.models, "") if asked.models else there(models_of(asked.folder))
    if not models:
        print(left_out)
        return 1
    ratios = speed(asked.speed or models[0], asked.backends, until, alike=asked.alike)
    different, left = identity(models, asked.backends, until)
    if left_out:
        print(left_out)
    names = " and ".join(asked.backends)
    print(f"{names}: {len(models) * len(WAYS) - left} ways, {different} differ, {left} not reached")
    first, second = asked.backends
    told = "not reached" if ratios is None else f"{ratios.plain:.3f}"
    print(f"decode {second} over {first}: {told}")
    if ratios is not None and ratios.alike is not None:
        print(f"decode {second} over {ALIKE}: {ratios.alike:.3f}")
    return 1 if different or left or ratios is None or ratios.counts < LOWEST else 0


if __name__ == "__main__":
    sys.exit(main())
