"""`strata conformance` on records that are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata_core.cli.main import main
from strata_core.errors import StrataError
from strata_core.machine import read_machine
from strata_core.testing.conformance import run


def test_a_sound_record_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "host", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["role"], document["name"], document["passed"]) == ("allocator", "host", True)
    assert len(document["tests"]) > 8
    assert {row["outcome"] for row in document["tests"]} == {"passed"}


def test_a_backend_with_devices_has_its_runtime_tested_too() -> None:
    result = run.run_conformance("backend", "sim", options={"threads": 1})
    outcomes = {row.test: row.outcome for row in result.rows}
    assert result.passed, result.failed
    assert outcomes["test_rows_are_added_in_router_order"] == "passed"
    assert outcomes["test_allocations_do_not_overlap"] == "passed"
    assert outcomes["test_a_graph_may_be_launched_on_another_thread"] == "passed"


@pytest.fixture
def wsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin for WSL as an installed distribution, for child processes too."""
    folder = Path(__file__).parents[2] / "plugins" / "wsl"
    if not folder.is_dir():
        pytest.skip("a source distribution of core has no plugins folder")
    info = tmp_path / "strata_wsl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strata-wsl\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[strata]\nwsl = strata_wsl.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("wsl")
def test_an_allocator_may_be_built_for_a_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "wsl", "--backend", "sim"]) == 0
    assert "allocator wsl: 11 tests passed" in capsys.readouterr().out


@pytest.mark.usefixtures("wsl")
def test_what_cannot_be_used_here_is_not_tested(capsys: pytest.CaptureFixture[str]) -> None:
    if read_machine().wsl:
        pytest.skip("this machine runs under WSL")
    assert main(["conformance", "wsl"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == ("strata: allocator wsl of strata-wsl 0.1.0 cannot be tested on this machine")
    assert told[1] == "this machine does not run under WSL"


@pytest.mark.usefixtures("wsl")
def test_what_is_blocked_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_BLOCK_PLUGINS", "wsl")
    assert main(["conformance", "wsl"]) == 2
    assert "there is no record named wsl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such"], "there is no record named"),
        (["aren"], "did you mean 'arena'?"),
        (["arena", "--role", "backend"], "there is no record named arena"),
        (["arena", "--role", "thing"], "the roles are"),
        (["arena", "--model", "/nowhere.gguf"], "/nowhere.gguf"),
    ],
)
def test_bad_use_is_told(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_record_that_does_not_build_fails_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from strata_core.testing.conformance import SourceSuite", ""]
    lines += ["class TestX(SourceSuite):", "    pass", ""]
    monkeypatch.setattr(run, "MODULE", "\n".join(lines))
    result = run.run_conformance("source", "unmade")
    assert not result.passed
    failed = {row.test for row in result.failed}
    assert "test_a_view_has_the_files_bytes" in failed
    assert any("supplies make(context)" in row.why for row in result.failed)


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MODULE", "import time\n\ntime.sleep(60)\n")
    with pytest.raises(StrataError, match="did not end within 2 s"):
        run.run_conformance("source", "slow", timeout=2.0)


def test_a_run_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MODULE", "import os\n\nos._exit(3)\n")
    with pytest.raises(StrataError, match="did not run on source gone"):
        run.run_conformance("source", "gone")


def test_what_the_suites_are_made_with_is_named_where_it_is_missing(tmp_path) -> None:
    """In an environment without pytest, as the README's first command makes it."""
    code = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'pytest' else real(name, *a)\n"
        "sys.modules['pytest'] = None\n"
        "from strata_core.cli.entry import run\n"
        "sys.argv = ['strata', 'conformance', 'cpu']\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "strata: the conformance suite cannot run",
        "pytest is not installed",
        "pip install 'strata-core[conformance]'",
    ]
