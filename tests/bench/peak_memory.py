"""How much memory of its own a run takes at most: anonymous pages, beside the experts' bytes.

    python tests/bench/peak_memory.py MODEL [MODEL ...] [--limit-gib 0.5]

Each model runs with the cpu backend, once with the arena and once from the mapped file, in a
process of its own that computes a prompt and decodes. Linux counts its anonymous pages
(RssAnon and, for shared ones such as the arena's, RssShmem); pages of the mapped file are the
system's and do not count. The arena may take the experts and the limit beside them, the mapped file
the limit alone. Exit code 1 where a run takes more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from strata_core.api import model_path
from strata_core.checkpoint.open import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def expert_bytes(model: str) -> int:
    """Bytes of all routed experts."""
    with closing(open_checkpoint(model_path(model))) as checkpoint:
        layouts = checkpoint.experts.layouts.values()
        return checkpoint.experts.count * sum(layout.nbytes for layout in layouts)


def anonymous(process: int) -> int:
    """Anonymous bytes of a process now; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    kinds = ("RssAnon:", "RssShmem:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def peak(model: str, source: str, prompt: int, decode: int) -> int:
    """The most anonymous bytes of a run, looked at every few milliseconds."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "strata_core", "bench", model, "--backend", "cpu"]
    command += ["--source", source, "-p", str(prompt), "-n", str(decode), "-r", "1", "--quiet"]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    ) as child:
        most = 0
        while child.poll() is None:
            most = max(most, anonymous(child.pid))
            time.sleep(0.005)
    if child.returncode:
        raise SystemExit(f"{model}, {source}: exit code {child.returncode}")
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model with both sources; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("-n", "--decode", type=int, default=16, help="tokens decoded (16)")
    parser.add_argument("--limit-gib", type=float, default=0.5, help="beside the experts (0.5)")
    given = parser.parse_args(arguments)
    print(f"{'model':<24}{'source':>8}{'experts GiB':>13}{'peak GiB':>10}{'beside GiB':>12}")
    within = True
    for model in given.models:
        experts = expert_bytes(model)
        for source in ("arena", "mmap"):
            most = peak(model, source, given.prompt, given.decode)
            beside = (most - (experts if source == "arena" else 0)) / GIB
            within &= beside <= given.limit_gib
            numbers = f"{experts / GIB:>13.3f}{most / GIB:>10.3f}{beside:>12.3f}"
            print(f"{Path(model).name:<24}{source:>8}{numbers}", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
