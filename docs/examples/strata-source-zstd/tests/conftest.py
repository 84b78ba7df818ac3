"""Makes this distribution importable from its folder; small packs; the command beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from strata_core.cli.main import main
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub

NEEDED = "zstandard"
collect_ignore_glob = [] if importlib.util.find_spec(NEEDED) else ["test_*.py"]
if importlib.util.find_spec("strata_source_zstd") is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))


ROOT = Path(__file__).parents[1]


def pytest_report_header() -> str | None:
    """Say so where the tests of this distribution cannot run."""
    return f"strata-source-zstd: not tested, {NEEDED} is missing" if collect_ignore_glob else None


@pytest.fixture
def make_pack(tmp_path: Path):
    """make_pack(expert type): a small pack, and the same with compressed experts."""

    def make(expert_type: str = "F32") -> tuple[Path, Path]:
        from strata_source_zstd.convert import convert

        if expert_type == "F32":
            model = tmp_path / "model"
            hyper = tiny_hyper(experts=7, layers=3, hidden=96, expert_ffn=64, head_dim=24)
            write_tiny_hub(model, hyper=hyper)
        else:
            model = tmp_path / "model.gguf"
            write_tiny_gguf(model, hyper=tiny_hyper(experts=7), expert_type=expert_type)
        pack, out = tmp_path / "pack", tmp_path / "compressed"
        assert main(["pack", str(model), str(pack), "-q"]) == 0
        convert(pack, out, report=lambda _line: None)
        return pack, out

    return make


@pytest.fixture
def strata(tmp_path: Path):
    """strata(*arguments): the JSON document of the command, this distribution installed for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(ROOT), str(info.parent), *filter(None, sys.path)])

    def run(*arguments: str, code: int = 0, **env: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "strata_core", *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": path, **env},
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    return run
