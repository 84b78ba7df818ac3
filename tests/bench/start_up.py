"""How long a start takes: to the first token, with nothing compiled yet and with warm caches.

    python tests/bench/start_up.py [MODEL ...]

Each start is a process of its own, timed from its beginning to the first byte of text on stdout:
one with an empty folder for compiled kernels, then several with what it left there. The seconds of
processor time that a start took, to its end, stand beside it: on a machine that does other work as
well they tell what is the start's own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "In the beginning God created"


def start(model: str, folder: str, threads: int | None) -> tuple[float, float]:
    """Seconds to the first text, and seconds of processor time until the process's end."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "STRATA_CACHE_DIR": folder}
    command = [sys.executable, "-m", "strata_core", "generate", model, PROMPT, "-n", "1"]
    command += ["--quiet", *(["--threads", str(threads)] if threads else [])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
        if child.stdout is None or not child.stdout.read(1):
            raise SystemExit(f"{model}: no text came")
        first = time.perf_counter() - began
        child.stdout.read()
    if child.returncode:
        raise SystemExit(f"{model}: exit code {child.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each model and print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["demo"], metavar="MODEL")
    parser.add_argument("-r", "--repeats", type=int, default=5, help="warm starts (5)")
    parser.add_argument("-t", "--threads", type=int, help="default: what the backend finds best")
    given = parser.parse_args(arguments)
    heads = ("cold s", "cpu s", "warm s", "low", "high", "cpu s")
    print(f"{'model':<24}" + "".join(f"{head:>9}" for head in heads))
    for model in given.models:
        with tempfile.TemporaryDirectory() as folder:
            cold = start(model, folder, given.threads)
            starts = [start(model, folder, given.threads) for _ in range(given.repeats)]
        warm, busy = zip(*starts, strict=True)
        figures = (*cold, median(warm), min(warm), max(warm), median(busy))
        shown = "".join(f"{seconds:>9.2f}" for seconds in figures)
        print(f"{Path(model).name:<24}{shown}", flush=True)


if __name__ == "__main__":
    main()
