"""A pack larger than its budget: memory stays within it, and the file cache does not grow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from strata_core.memory.platform.direct import open_direct
from strata_core.plan.sizes import BASE_BYTES
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

from .tier_memory import GIB, cached_bytes, drop, measure, packed, wrong

MIB = 1 << 20
SLACK = 48 * MIB
"""What is not counted: less than what the tier leaves in the file."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and mincore are Linux's"),
    pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT"),
]


def test_memory_and_file_cache(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    hyper = tiny_hyper(hidden=512, expert_ffn=1024, experts=48, layers=4)
    write_tiny_gguf(source, hyper=hyper, expert_type="Q4_0")
    pack = packed(source, tmp_path)
    file = open_direct(pack / "experts.bin")
    refusal = file.refusal
    file.close()
    if refusal:
        pytest.skip(f"{pack}: {refusal}")
    budget = (BASE_BYTES + 90 * MIB) / GIB  # the ring of a layer's experts takes 41 MiB of it
    found = measure(pack, budget, 12, max_context=64, threads=1)
    assert found["experts"] > 160 * MIB
    assert 0 < found["kept"] * found["experts"] / 192 < 60 * MIB
    # What it took above its start is what was planned beside the interpreter.
    assert found["peak"] - found["before"] < found["planned"] - BASE_BYTES + SLACK, found
    assert found["peak"] < found["budget"]
    assert found["read"]["experts"] > found["kept"]
    assert found["cached_after"] <= found["cached_before"]
    assert found["file_bytes_s"] > 0


def test_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 * MIB))
    assert cached_bytes(path) == 1 * MIB
    drop(path)
    if cached_bytes(path):
        pytest.skip("its file system keeps everything in memory")
    with path.open("rb") as stream:
        stream.read(1)
    assert cached_bytes(path) > 0


def test_what_is_wrong_is_told() -> None:
    good = {
        "experts": 4 * GIB,
        "budget": 1 * GIB,
        "peak": GIB * 3 // 2,
        "cached_before": 5,
        "cached_after": 5,
        "read": {"experts": 9},
        "kept": 8,
    }
    assert wrong(good) == []
    for change in (
        {"experts": GIB},
        {"peak": GIB * 3 // 2 + 1},
        {"cached_after": 6},
        {"read": {"experts": 8}},
    ):
        assert len(wrong({**good, **change})) == 1
