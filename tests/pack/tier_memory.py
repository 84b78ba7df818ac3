"""What a tier in memory takes when the pack is larger: peak memory, and pages in the file cache.

    python tests/pack/tier_memory.py MODEL.gguf --ram-budget GIB [--tokens 32] [--folder FOLDER]

Packs MODEL into FOLDER (default: a folder beside it that is removed afterwards), generates with
`--source tiered-file` in a process of its own, and prints one JSON document: the budget, the peak
of that process's memory (and what it had `before`, with everything but a model loaded), and how
much of experts.bin is in the system's file cache before and after. Leaves with 1 where the peak is
above the budget and 0.5 GiB, where more of the file is cached afterwards, or where nothing was read
from it. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GIB = 1 << 30
ALLOWED = GIB // 2
"""What the peak may be above the budget."""

CHILD = """
import json, sys
from pathlib import Path
import strata_core
from strata_core.engine.messages import Finished

def own(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith(name + ":"))

pack, budget, tokens, more = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
options = {"backend": "cpu", "source": "tiered-file", "ram_budget": budget, "learn": False}
with strata_core.load("demo", backend="cpu", max_context=64, learn=False) as model:
    list(model.generate([5, 6], max_tokens=2))
before = own("VmRSS")
with strata_core.load(pack, **options, **json.loads(more)) as model:
    *_, done = model.generate(list(range(5, 37)), max_tokens=tokens, ignore_eos=True)
    assert isinstance(done, Finished)
    plan, beside = model.plan, model.beside.as_json(model.counters)
    print(json.dumps({
        "peak": own("VmHWM"), "before": before, "planned": plan.tier("ram").need,
        "kept": plan.reads.experts_kept, "in_file": plan.reads.experts_in_file,
        "read": model.counters["file"], "file_bytes_s": beside["file_bytes_s"]["actual"],
        "decode_tok_s": done.rounds / max(done.decode_s, 1e-9),
    }))
"""


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the system's file cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        flags = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        code = libc.mincore(address, length, ctypes.c_void_p(flags.ctypes.data))
        del view
        if code:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((flags & 1).sum()) * mmap.PAGESIZE


def drop(path: Path) -> None:
    """Have a file leave the cache: what was written to it lies on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(pack: Path, budget: float, tokens: int, **more: Any) -> dict[str, Any]:
    """Generate from a pack in another process, with a budget in GiB; bytes."""
    experts = pack / "experts.bin"
    drop(experts)
    before = cached_bytes(experts)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(pack), str(budget), str(tokens), json.dumps(more)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {
        "experts": experts.stat().st_size,
        "budget": int(budget * GIB),
        **json.loads(done.stdout),
        "cached_before": before,
        "cached_after": cached_bytes(experts),
    }


def packed(model: Path, folder: Path) -> Path:
    """The pack of a model in a folder."""
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.pack.write import write_pack

    class Silent:
        def start(self, label: str, nbytes: int) -> None:
            pass

        def advance(self, nbytes: int) -> None:
            pass

        def done(self) -> None:
            pass

    checkpoint = open_checkpoint(model)
    try:
        return write_pack(checkpoint, folder / "pack", Silent()).path
    finally:
        checkpoint.close()


def wrong(found: dict[str, Any]) -> list[str]:
    """In what a measurement is not what is wanted."""
    said = []
    if found["experts"] <= found["budget"]:
        said.append("the experts fit in the budget, so nothing was measured")
    if found["peak"] > found["budget"] + ALLOWED:
        said.append("the peak is above the budget and 0.5 GiB")
    if found["cached_after"] > found["cached_before"]:
        said.append("more of experts.bin is in the file cache afterwards")
    if not found["read"]["experts"] > found["kept"]:
        said.append("nothing was read from the file while it generated")
    return said


def main() -> int:
    """The document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ram-budget", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="strata-tier-", dir=asked.model.parent)
            folder = Path(stack.enter_context(made))
        found = measure(packed(asked.model, folder), asked.ram_budget, asked.tokens)
    found["wrong"] = wrong(found)
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
