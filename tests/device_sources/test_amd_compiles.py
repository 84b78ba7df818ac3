"""The device kernels compile for AMD: a sample here, all with compile_table.py by hand.

How many compiled is in the output (`pytest -rP`), as is what they need.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from code_object import usages
from compile_table import SKIPPED

SCRIPT = Path(__file__).with_name("compile_table.py")

RUNS = {
    "hiprtc": ("gfx906", "gfx90a", "gfx1030"),
    "clang": ("gfx1100", "gfx942", "gfx1200"),
}


@pytest.mark.parametrize("compiler", RUNS)
def test_a_sample_of_the_kernels_compiles(compiler, record_property):
    command = [sys.executable, str(SCRIPT), compiler, *RUNS[compiler], "--sample"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    counted = [line for line in done.stdout.splitlines() if " compiled, " in line]
    print(done.stdout)
    record_property("compiled", counted[0] if counted else "none")
    assert done.returncode == 0, done.stdout + done.stderr
    good, _, total = counted[0].split()[:3]
    assert good == total
    assert int(total) >= 17
    assert counted[0].endswith(" 0 spill")


@pytest.mark.parametrize(
    "code", [b"", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(80)]
)
def test_what_is_no_code_object(code):
    with pytest.raises(ValueError, match=r"no 64-bit ELF file|no metadata note"):
        usages(code)
