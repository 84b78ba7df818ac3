"""`strata conformance` on records that are installed."""

from __future__ import annotations

import json

import pytest

from strata_core.cli.main import main
from strata_core.errors import StrataError
from strata_core.testing.conformance import run


def test_a_sound_record_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "host", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["role"], document["name"], document["passed"]) == ("allocator", "host", True)
    assert len(document["tests"]) > 8
    assert {row["outcome"] for row in document["tests"]} == {"passed"}


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
