"""The dummy distribution really built and installed, then loaded by a fresh interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
DUMMY = REPOSITORY / "tests" / "dummy_plugin"

pytestmark = pytest.mark.plugin

STAGES = {
    ("import-error", "import", "1.2"),
    ("exits", "import", "1.2"),
    ("mistyped-hook", "hooks", "1.2"),
    ("generator", "records", "1.2"),
    ("wrong-api", "api", "1.2"),
    ("good", "duplicate", "1.2"),
    ("duplicate", "duplicate", "1.2"),
}

REPORT = """
import json
from strata_core.machine import read_machine
from strata_core.plugin_report import report_plugins
from strata_core.plugins import load_plugins, probe_catalogue
from strata_core.selection import select_backend
from strata_dummy.clock import over_when_only

catalogue = load_plugins()
probes = probe_catalogue(catalogue, read_machine(), 0.5, over_when_only("slow"))
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
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(target: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python beside the installed plugins, free of the settings of whoever runs the tests."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    path = os.pathsep.join([str(REPOSITORY), str(target)])
    return subprocess.run(
        [sys.executable, *args],
        env={**plain, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(target / "none"), **variables},
        cwd=target,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def broken(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    ours = [item for item in report["broken"] if item["distribution"] == "strata-dummy"]
    return {(item["entry_point"], item["stage"], item["version"]) for item in ours}


def test_an_installed_distribution_is_found_and_quarantined_by_entry_point(target):
    # The slow probe waits for an hour: it keeps no process alive.
    done = run(target, "-c", REPORT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "printed at import" in done.stderr
    assert broken(report) == STAGES
    backends = {item["name"]: item for item in report["backends"]}
    assert {"own", "reference", "slow", "talkative"} <= set(backends)
    assert "dummy" not in backends
    assert backends["slow"]["reason"] == "its probe gave no answer within 0.5 s"
    assert backends["talkative"]["selected"] is True
    assert report["selections"]["backend"]["distribution"] == "strata-dummy"


def test_the_command_lists_all_of_it_on_a_clean_stdout(target):
    command = ("-m", "strata_core", "plugins", "--json", "--backend", "reference")
    done = run(target, *command, STRATA_BLOCK_PLUGINS="slow-probe")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "printed at import" in done.stderr
    assert broken(report) == STAGES
    ours = [item["name"] for item in report["backends"] if item["distribution"] == "strata-dummy"]
    assert ours == ["own", "talkative"]
    assert report["selections"]["backend"]["name"] == "reference"
    assert report["blocked"] == [
        {"name": "slow-probe", "entry_points": ["strata-dummy: slow-probe"]}
    ]


def test_the_help_does_not_notice_broken_plugins(target):
    done = run(target, "-m", "strata_core", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "plugins" in done.stdout


def test_a_name_that_two_entry_points_offer_cannot_be_asked_for(target):
    command = ("-m", "strata_core", "plugins", "--backend", "dummy")
    done = run(target, *command, STRATA_BLOCK_PLUGINS="slow-probe")
    assert done.returncode == 2
    places = "strata-dummy 1.2 (duplicate) and by strata-dummy 1.2 (good)"
    assert f"\n  backend 'dummy' is offered by {places}\n" in done.stdout


def test_without_what_is_broken_the_sound_rest_is_chosen(target):
    kept_out = ["slow-probe", "duplicate", "prints", "cuda", "hip", "wsl"]
    kept_out += [name for name, stage, _ in STAGES if stage != "duplicate"]
    done = run(
        target, "-m", "strata_core", "plugins", STRATA_BLOCK_PLUGINS=",".join(sorted(kept_out))
    )
    assert done.returncode == 0, done.stdout
    assert "\n  dummy, because: the only backend usable here that is no fallback\n" in done.stdout
    assert "\n  dummy-memory, because: the only allocator usable here\n" in done.stdout
