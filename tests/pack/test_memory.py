"""Packing and verifying stream: memory does not grow with the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ALLOWED = 64 * MIB
"""Buffers of four threads, the records of all items, and what the allocator keeps."""

SCRIPT = """
import json, resource, sys
from pathlib import Path
from strata_core.checkpoint.open import open_checkpoint
from strata_core.pack.verify import CHECKS, run_checks
from strata_core.pack.write import write_pack

class Silent:
    def start(self, label, nbytes): pass
    def advance(self, nbytes): pass
    def done(self): pass

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

checkpoint = open_checkpoint(sys.argv[1])
opened = peak()
write_pack(checkpoint, Path(sys.argv[2]), Silent())
packed = peak()
verdicts = [o.verdict for o in run_checks(CHECKS, open_checkpoint(sys.argv[2]), Silent())]
print(json.dumps([opened, packed, peak(), verdicts]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_peak_memory(tmp_path: Path) -> None:
    hyper = tiny_hyper(hidden=512, expert_ffn=1024, experts=64, layers=4, vocabulary=9000)
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=hyper, expert_type="Q4_0", dense_type="F32")
    size = source.stat().st_size
    assert size > 3 * ALLOWED, "the model must be bigger than what is allowed"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    opened, packed, verified, verdicts = json.loads(done.stdout)
    assert set(verdicts) == {"ok"}
    assert packed - opened < ALLOWED
    assert verified - opened < ALLOWED
