"""The dummy distribution really built and installed, then loaded by a fresh interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DUMMY = REPOSITORY / "tests" / "dummy_plugin"

REPORT = """
import json
from strata_core.machine import read_machine
from strata_core.plugin_report import report_plugins
from strata_core.plugins import load_plugins, probe_catalogue
from strata_core.selection import select_backend

catalogue = load_plugins()
probes = probe_catalogue(catalogue, read_machine(), seconds=0.5)
chosen = select_backend(catalogue.backends, catalogue.broken, probes["backend"], "talkative")
print(json.dumps(report_plugins(catalogue, {"backend": chosen}, probes)))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    for needed in ("pip", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"building a distribution needs {needed}")
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--no-cache-dir"]
    done = subprocess.run(
        [*command, "--target", str(folder), str(DUMMY)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.plugin
def test_an_installed_distribution_is_found_and_quarantined_by_entry_point(target):
    path = os.pathsep.join([str(REPOSITORY), str(target)])
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=target,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "printed at import" in done.stderr
    ours = [item for item in report["broken"] if item["distribution"] == "strata-dummy"]
    assert {(item["entry_point"], item["stage"], item["version"]) for item in ours} == {
        ("import-error", "import", "1.2"),
        ("exits", "import", "1.2"),
        ("mistyped-hook", "hooks", "1.2"),
        ("generator", "records", "1.2"),
        ("wrong-api", "api", "1.2"),
        ("good", "duplicate", "1.2"),
        ("duplicate", "duplicate", "1.2"),
    }
    backends = {item["name"]: item for item in report["backends"]}
    assert {"own", "reference", "slow", "talkative"} <= set(backends)
    assert "dummy" not in backends
    assert backends["slow"]["reason"] == "its probe gave no answer within 0.5 s"
    assert backends["talkative"]["selected"] is True
    assert report["selections"]["backend"]["distribution"] == "strata-dummy"
