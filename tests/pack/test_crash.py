"""A kill at any moment: OUT is absent or whole, nothing half opens, and the next run ends well."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.pack.write import Packed, partial_folder
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

ROOT = Path(__file__).parents[2]
LAB = Path(__file__).with_name("crash_lab.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

HANGS = 240.0
"""Seconds after which a process counts as hanging."""

# Early calls, a random sample, and each of the last ones: manifest, journal, renaming.
SEED = 20240901
KILLS = [1, 2, 3, 4, 5, 6, *random.Random(SEED).sample(range(7, 110), 14), *range(-15, 0)]


@pytest.fixture(scope="module")
def lab(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lab")
    done = subprocess.run(
        [sys.executable, str(LAB), str(model), str(folder), ",".join(map(str, KILLS))],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["calls"] > 100, "the kills must fall within the run"
    return found


def test_every_child_died_where_it_should(lab: dict[str, Any]) -> None:
    inside = [run for number, run in lab["runs"].items() if int(number) <= lab["calls"]]
    assert len(inside) == len(lab["runs"]) >= len(KILLS) - 1
    assert all(run["killed"] for run in inside)


def test_out_is_absent_or_whole(lab: dict[str, Any]) -> None:
    seen = {"absent": 0, "whole": 0}
    for number, run in lab["runs"].items():
        seen["absent" if run["out"] is None else "whole"] += 1
        if run["out"] is not None:
            extra = set(run["out"]) - set(lab["whole"])
            assert extra <= {"strata-pack.journal"}, number
            assert {k: v for k, v in run["out"].items() if k not in extra} == lab["whole"], number
    assert all(seen.values()), "both outcomes must have occurred"


def test_what_is_left_opens_only_where_all_of_it_is_there(lab: dict[str, Any]) -> None:
    for number, run in lab["runs"].items():
        if run["partial_opens"]:
            assert run["partial"] is not None
            assert lab["whole"].items() <= run["partial"].items(), number


def test_the_next_run_makes_the_pack(lab: dict[str, Any]) -> None:
    for number, run in lab["runs"].items():
        assert run["after"] == lab["whole"], number
        assert not run["rest"], number


def test_the_next_run_goes_on(lab: dict[str, Any]) -> None:
    resumed = [run["resumed"] for _, run in sorted(lab["runs"].items(), key=lambda i: int(i[0]))]
    assert resumed[0] == 0
    assert resumed == sorted(resumed), "a later kill leaves more"
    assert len(set(resumed)) > 3


def test_the_command_killed_from_outside(tmp_path: Path, pack: Callable[..., Packed]) -> None:
    """kill -9 from another process, at moments that nobody chose."""
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(layers=6, experts=16))
    whole = pack(source, tmp_path / "whole").manifest
    out = tmp_path / "out"
    for delay in (0.0, 0.02, 0.05, 0.09):
        child = subprocess.Popen(
            [sys.executable, "-m", "strata_core", "pack", str(source), str(out), "-q"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + HANGS
        while not partial_folder(out).exists() and child.poll() is None:
            assert time.monotonic() < deadline, "it began no pack"
            time.sleep(0.002)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait(HANGS)
        if out.exists():
            assert open_checkpoint(out).pack == whole
        elif partial_folder(out).exists():
            with pytest.raises(CheckpointError):
                open_checkpoint(out)
    assert pack(source, out).manifest == whole
