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
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

NEEDED = "aiohttp"
collect_ignore_glob = [] if importlib.util.find_spec(NEEDED) else ["test_*.py"]
sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("strata_source_fsspec") is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))


ROOT = Path(__file__).parents[1]


def pytest_report_header() -> str | None:
    """Say so where the tests of this distribution cannot run."""
    return f"strata-source-fsspec: not tested, {NEEDED} is missing" if collect_ignore_glob else None


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pack, whole. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("models")
    hyper = tiny_hyper(experts=7, layers=3, hidden=96, expert_ffn=64, head_dim=24)
    write_tiny_hub(folder / "model", hyper=hyper)
    assert main(["pack", str(folder / "model"), str(folder / "pack"), "-q"]) == 0
    return folder / "pack"


@pytest.fixture
def mirrored(pack: Path, tmp_path: Path) -> Path:
    """The pack's mirror: all but the experts, which stay where they are."""
    from strata_source_fsspec.command import mirror

    mirror(str(pack), tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.fixture
def server(pack: Path):
    """An HTTP server on this computer that serves the pack and can misbehave."""
    from unreliable_server import serving

    with serving(pack) as running:
        yield running


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
