"""One long prompt from every place: the bits of its first logits, the tokens behind it, its time.

    python tests/device/long_prompt.py MODEL [-p 32768] [-n 8] [--backend cuda] [--ram-budget GIB]
        [--only TEXT ...]

A line for each way: experts in slots (all, half, none), lengths of chunks, the paths of page-locked
memory, a tier that leaves a fifth of the experts in the file. Leaves with 1 where two ways differ
or one does not run.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

import strata_core  # noqa: E402
from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402

GIB = 1 << 30


def ways(experts: int, nbytes: int) -> dict[str, dict[str, Any]]:
    """Each way by its name."""
    half = {"expert_cache": experts // 2}
    pinned = {"source": "sliced-pinned", **half}
    return {
        "all in slots": {"expert_cache": experts},
        "all, chunks of 2048": {"expert_cache": experts, "prefill": 2048},
        "all, chunks of 1000": {"expert_cache": experts, "prefill": 1000},
        "half": half,
        "half, chunks of 8192": {**half, "prefill": 8192},
        "none": {"expert_cache": 0},
        "none, chunks of 3000": {"expert_cache": 0, "prefill": 3000},
        "path 1, half": {**pinned, "complement_pin_gib": "all"},
        "path 2, half": {**pinned, "test_complement_refuse": True},
        "path 3, half": {**pinned, "complement_pin_gib": 0.0},
        "tier, half": {**half, "source": "tiered-file", "ram_budget": (0.3 * nbytes) / GIB + 1},
    }


def attempt(model: Path, ids: tuple[int, ...], tokens: int, options: dict[str, Any]) -> list[str]:
    """A hash of the first logits and the tokens, how long the prompt took, and the memory."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "logits.npy"
        more = {"max_context": len(ids) + tokens, "dump_first_logits": str(dump), "learn": False}
        with strata_core.load(model, **{**options, **more}) as loaded:
            began = time.perf_counter()
            *_, done = loaded.generate(ids, max_tokens=tokens, ignore_eos=True)
            taken = time.perf_counter() - began
            memory = loaded.beside.as_json(loaded.counters)["memory"]
        bits = hashlib.sha256(dump.read_bytes() + repr(done.token_ids).encode()).hexdigest()
    rows = [f"{row['kind']} {row['actual']} of {row['planned']} planned" for row in memory]
    return [bits[:16], f"{taken:6.2f} s;", ", ".join(rows)]


def main() -> int:
    """Run the ways, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-p", "--prompt", type=int, default=32768)
    parser.add_argument("-n", "--tokens", type=int, default=8)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ram-budget", type=float, help="GiB, of the ways that have none")
    parser.add_argument("--only", nargs="+", default=[""])
    asked = parser.parse_args()
    checkpoint = open_checkpoint(asked.model)
    hyper, files = checkpoint.hyper, checkpoint.experts
    experts = files.count * len(files.layouts)
    nbytes = sum(files.count * layout.nbytes for layout in files.layouts.values())
    checkpoint.close()
    drawn = np.random.default_rng(7).integers(0, hyper.vocabulary, asked.prompt)
    ids = tuple(drawn.tolist())
    found: dict[str, str] = {}
    failed = 0
    for name, options in ways(experts, nbytes).items():
        if not any(text in name for text in asked.only):
            continue
        given = {"backend": asked.backend, "source": "arena", **options}
        if asked.ram_budget and "ram_budget" not in given:
            given["ram_budget"] = asked.ram_budget
        try:
            bits, *rest = attempt(asked.model, ids, asked.tokens, given)
        except StrataError as error:
            failed += 1
            print(f"{name:22} {' '.join(str(error).split())[:300]}", flush=True)
            continue
        found[name] = bits
        print(f"{name:22} {bits} {' '.join(rest)}", flush=True)
    same = len(set(found.values())) <= 1
    print(f"{len(found)} ways, {'all equal' if same else 'NOT EQUAL'}; {failed} did not run")
    return 0 if found and same and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
