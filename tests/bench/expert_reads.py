"""How long experts take from their file, one alone and many at once.

    python tests/bench/expert_reads.py MODEL [--chunk KIB ...] [--threads N ...] [--experts 150]

Random experts are read unbuffered by the reader of the tier (`sources/reading.py`): each waited for
before the next begins, as a round waits for one, then with 13 on their way. Every chunk length is
tried with every number of threads, twice in turn.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from pathlib import Path
from unittest.mock import patch

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import Expert, ExpertFiles
from strata_core.sources import reading
from strata_core.sources.reading import THREADS, ExpertReader, place

AT_ONCE = 13


def measure(files: ExpertFiles, threads: int, count: int, seed: int) -> str:
    """Milliseconds of a lone expert, and GB/s of both."""
    draw = random.Random(seed)
    layers = list(files.layouts)
    some = [Expert(draw.choice(layers), draw.randrange(files.count)) for _ in range(2 * count)]
    placed = {expert: place(files.pieces(expert)) for expert in some}
    largest = max(placing.nbytes for placing in placed.values())
    memory = memoryview(mmap.mmap(-1, (AT_ONCE + 1) * largest))
    reader = ExpertReader.open(
        {p.file for e in some for p in files.pieces(e)}, print, threads=threads
    )
    try:
        alone, nbytes = [], 0
        for expert in some[:count]:
            placing = placed[expert]
            began = time.perf_counter()
            reader.start(expert, placing, memory[: placing.nbytes]).wait()
            alone.append(time.perf_counter() - began)
            nbytes += placing.nbytes
        rate, waiting, many = nbytes / sum(alone), [], 0
        began = time.perf_counter()
        for number, expert in enumerate(some[count:]):
            placing, at = placed[expert], number % (AT_ONCE + 1) * largest
            waiting.append(reader.start(expert, placing, memory[at : at + placing.nbytes]))
            many += placing.nbytes
            if len(waiting) == AT_ONCE:
                waiting.pop(0).wait()
        for last in waiting:
            last.wait()
        together = many / (time.perf_counter() - began)
    finally:
        reader.close()
    return (
        f"alone {statistics.median(alone) * 1e3:.2f} ms (median), {rate / 1e9:.2f} GB/s; "
        f"{AT_ONCE} at once {together / 1e9:.2f} GB/s"
    )


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--chunk", type=int, nargs="+", default=[reading.CHUNK >> 10], help="KiB")
    parser.add_argument("--threads", type=int, nargs="+", default=[THREADS])
    parser.add_argument("--experts", type=int, default=150)
    given = parser.parse_args()
    files = open_checkpoint(given.model).experts
    for seed in range(2):
        for chunk in given.chunk:
            for threads in given.threads:
                with patch.object(reading, "CHUNK", chunk << 10):
                    found = measure(files, threads, given.experts, seed)
                print(f"chunks of {chunk} KiB, {threads} threads: {found}", flush=True)


if __name__ == "__main__":
    main()
