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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from identity import experts_of, prompts_of, run

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.engine.messages import Finished
from strata_core.errors import StrataError

KJV = ("kjv-Q4_K_M.gguf", "kjv-Q8_0.gguf", "kjv-Q4_0.gguf", "kjv-MXFP4.gguf", "")
TINY = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")
WAYS = (("half", "arena"), ("half", "sliced-pinned"), ("0", "arena"), ("auto", "arena"))
"""Size of the cache of experts, and where the others lie."""

TURNS, TOKENS = 7, 200
LOWEST = 0.95


def models_of(folder: Path) -> list[Path]:
    """The models, both kinds in turn so that a short run sees them; "" is the hub's folder."""
    kjv = [folder / "kjv-moe" / name for name in KJV]
    tiny = [folder / "tiny" / name for name in TINY]
    mixed = [model for pair in zip(kjv, tiny, strict=False) for model in pair]
    return [*mixed, *kjv[len(tiny) :]]


def hashes(model: Path, options: dict[str, Any], prompts: dict[str, tuple[int, ...]]):
    """Of each prompt the first logits and the tokens, or what went wrong."""
    try:
        found = run(model, options, prompts)
        return {name: (a, b) for name, a, b, _ in found if name != "counters"}
    except StrataError as problem:  # told as a cell of the table
        return " ".join(str(problem).split())[:200]


def identity(models: Sequence[Path], backends: Sequence[str], until: float) -> tuple[int, int]:
    """Print the table; ways that differ, and ways that were not reached."""
    different = left = 0
    for model in models:
        if time.monotonic() > until:
            left += len(WAYS)
            continue
        hyper = open_checkpoint(model).hyper
        prompts = prompts_of(hyper.vocabulary, long=False)
        if hyper.context < 100:
            prompts = {"short": prompts["short"], "sampled": prompts["sampled"][:12]}
        expected = hashes(model, {"backend": "cpu"}, prompts)
        for cache, source in WAYS:
            if time.monotonic() > until:
                left += 1
                continue
            size = str(experts_of(model) // 2) if cache == "half" else cache
            options = {"expert_cache": size, "source": source}
            begin = time.monotonic()
            found = {b: hashes(model, {**options, "backend": b}, prompts) for b in backends}
            told = [f"{b} {verdict(found[b], expected)}" for b in backends]
            different += any(not text.endswith(" equal") for text in told)
            name = f"{model.parent.name}/{model.name}" if model.suffix else model.name
            first = expected["short"][0] if isinstance(expected, dict) else f"CPU: {expected}"
            told.append(f"{time.monotonic() - begin:.1f} s")
            print(f"{name:26} {cache:4} {source:13} {first}", ", ".join(told), flush=True)
    return different, left


def verdict(found: Any, expected: Any) -> str:
    """Equal, or which prompts differ, or the error."""
    if isinstance(found, str):
        return f"FAILS {found}"
    if isinstance(expected, str):
        return "has nothing to equal"
    if found == expected:
        return "equal"
    return f"DIFFERS in {[name for name in found if found[name] != expected.get(name)]}"


def speed(model: Path, backends: Sequence[str], until: float) -> float | None:
    """Decode in turn, both loaded; the second's median over the first's, None if not reached."""
    if time.monotonic() > until:
        return None
    ids = prompts_of(open_checkpoint(model).hyper.vocabulary, long=False)["short"]
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
