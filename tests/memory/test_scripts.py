"""The programs that measure page-locking run, here on a small amount of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata_core.machine import read_machine

ROOT = Path(__file__).parents[2]


def output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_paths_are_measured() -> None:
    limit = read_machine().memlock_limit
    if limit is not None and limit < 64 << 20:
        pytest.skip(f"only {limit} bytes may be locked")
    sizes = ("--gib", "0.03", "--slice-mib", "8", "--repeat", "1")
    text = output("tests/memory/measure_paths.py", *sizes)
    assert "pinned: " in text
    assert "path 2 / path 1, medians: " in text


def test_a_driver_is_checked() -> None:
    driver = ("--runtime", "strata_core.testing.sim:SimRuntime")
    text = output("tests/device/check_memory.py", *driver, "--gib", "0.02", "--slice-mib", "4")
    lines = text.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "path 1",
        "path 2",
        "path 2, half",
        "pinned prefix",
        "path 3",
        "probe",
    ]
    assert all(" 0 differ" in line for line in lines[:-1])
    assert "was refused" in lines[1]
