"""Measure the tiered file: reads against a plain loop, decode against everything resident.

    python tests/sources/measure_tier.py MODEL.gguf [--share 0.2] [--tokens 32] [--experts 200]

MODEL must be on a real disk. `--share` is the part of the asked-for expert bytes that should come
from the file, by a profile that is counted first. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import strata_core
from strata_core.api import make_plan
from strata_core.cache.profile import Profile, read_profile
from strata_core.cache.rank import ranking, rates
from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.engine.messages import Finished
from strata_core.interfaces import Expert
from strata_core.sources.reading import CHUNK, THREADS, ExpertReader, Reading
from strata_core.sources.tier_sizes import placings

AT_ONCE = 8


def plain_loop(checkpoint: Checkpoint, experts: list[Expert]) -> float:
    """Bytes a second of O_DIRECT reads of the same ranges, by as many threads, nothing else."""
    placed = placings(checkpoint.experts)
    ranges = [part for expert in experts for part in placed[expert].ranges]
    jobs = [
        (part.file, part.offset + at, min(CHUNK, part.nbytes - at))
        for part in ranges
        for at in range(0, part.nbytes, CHUNK)
    ]
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in checkpoint.files}

    def work(number: int) -> None:
        with mmap.mmap(-1, CHUNK) as page, memoryview(page) as target:
            for path, offset, nbytes in jobs[number::THREADS]:
                os.preadv(files[path], [target[:nbytes]], offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    took = time.perf_counter() - began
    for descriptor in files.values():
        os.close(descriptor)
    return sum(part.nbytes for part in ranges) / took


def tier_reads(checkpoint: Checkpoint, experts: list[Expert]) -> float:
    """Bytes a second of the same experts through the source's reader, AT_ONCE on their way."""
    placed = placings(checkpoint.experts)
    reader = ExpertReader.open(checkpoint.files, print)
    largest = max(placed[expert].nbytes for expert in experts)
    with mmap.mmap(-1, largest * AT_ONCE) as memory, memoryview(memory) as whole:
        cells = [whole[i * largest : (i + 1) * largest] for i in range(AT_ONCE)]
        began = time.perf_counter()
        waiting: deque[Reading] = deque()
        for number, expert in enumerate(experts):
            if len(waiting) == AT_ONCE:
                waiting.popleft().wait()
            cell = cells[number % AT_ONCE][: placed[expert].nbytes]
            waiting.append(reader.start(expert, placed[expert], cell))
        for reading in waiting:
            reading.wait()
        took = time.perf_counter() - began
        reader.close()
        for cell in cells:
            cell.release()
    return sum(placed[expert].nbytes for expert in experts) / took


def reads(model: Path, count: int, rounds: int = 5) -> dict[str, Any]:
    """Both rates, side by side, in turns; different experts in each round."""
    checkpoint = open_checkpoint(model)
    every = list(placings(checkpoint.experts))
    random.seed(7)
    plain, tier = [], []
    for _ in range(rounds):
        experts = random.sample(every, min(count, len(every)))
        plain.append(plain_loop(checkpoint, experts))
        tier.append(tier_reads(checkpoint, experts))
    ratios = [b / a for a, b in zip(plain, tier, strict=True)]
    return {
        "plain_gb_s": round(statistics.median(plain) / 1e9, 3),
        "tier_gb_s": round(statistics.median(tier) / 1e9, 3),
        "ratio_of_medians": round(statistics.median(tier) / statistics.median(plain), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def apart(model: Path, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """`decode` in a process of its own, so that its memory is told alone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(decode, model, tokens, options).result()


def decode(model: Path, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """One run: its rate, hash, memory, and what was read from the file while it decoded."""
    with strata_core.load(model, **options) as loaded:
        before = loaded.counters
        *_, done = loaded.generate(list(range(5, 13)), max_tokens=tokens, ignore_eos=True)
        assert isinstance(done, Finished)
        after = loaded.counters
    figures = {
        "tok_s": round((len(done.token_ids) - 1) / done.decode_s, 2),
        "hash": done.first_logits_sha256[:16],
        "tokens": hashlib.sha256(str(done.token_ids).encode()).hexdigest()[:16],
        "max_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    for key in after.get("file", {}):
        figures[key] = after["file"][key] - before["file"][key]
    return figures


def budget(model: Path, profile: Profile, share: float) -> float:
    """A --ram-budget, in GiB, with which such a share of a token's experts is in the file alone."""
    checkpoint = open_checkpoint(model)
    experts = checkpoint.experts
    order = ranking(profile, list(experts.layouts), experts.count)
    expected = rates(profile, order, checkpoint.hyper.top_k / experts.count)
    placed = placings(experts)
    left, cells = share * sum(expected), sum(each.nbytes for each in placed.values())
    for expert, rate in zip(reversed(order), reversed(expected), strict=True):
        if left < rate:
            break
        left -= rate
        cells -= placed[expert].nbytes
    plan = make_plan(model, source="tiered-file", ram_budget=20).plan
    ram = next(tier for tier in plan.tiers if tier.name == "ram")
    rest = sum(item.nbytes for item in ram.items if item.what != "experts")
    return (rest + cells + 1) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--experts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("reads", "decode"))
    asked = parser.parse_args()
    result: dict[str, Any] = {}
    if asked.only != "decode":
        result["reads"] = reads(asked.model, asked.experts)
    if asked.only != "reads":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            resident = {"source": "arena", "expert_profile_save": str(path)}
            apart(asked.model, asked.tokens, resident)
            share = budget(asked.model, read_profile(path), asked.share)
            tiered = {"source": "tiered-file", "ram_budget": share, "expert_profile": str(path)}
            runs: dict[str, list[dict[str, Any]]] = {"tiered": [], "resident": []}
            for _ in range(asked.rounds):
                runs["tiered"].append(apart(asked.model, asked.tokens, tiered))
                runs["resident"].append(apart(asked.model, asked.tokens, {"source": "arena"}))
            speed = {
                name: statistics.median(run["tok_s"] for run in found)
                for name, found in runs.items()
            }
            result |= {"ram_budget_gib": round(share, 2), **runs, "tok_s": speed}
            result["ratio"] = round(speed["tiered"] / speed["resident"], 3)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
