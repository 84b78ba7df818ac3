"""Two ways to call the command: in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from strata_core.cli.main import main

ROOT = Path(__file__).parents[2]


@frozen
class Result:
    """What a call of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def error_lines(self) -> list[str]:
        """The three lines of an error on stderr, and nothing else there."""
        lines = self.err.splitlines()
        assert len(lines) == 3, self.err
        assert lines[0].startswith("strata: ")
        assert all(line.strip() for line in lines)
        assert "Traceback" not in self.err
        return lines


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of whoever runs the tests takes part."""
    for name in list(os.environ):
        if name.startswith("STRATA_") and not name.startswith("STRATA_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-settings"))


@pytest.fixture
def strata(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Call the command in this process."""

    def call(*args: str) -> Result:
        code = main(args)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[bytes]]:
    """Start the command as a process of its own; what is left running is killed at the end.

    `program` is Python that calls the command itself, where a test changes something before.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str, program: str = "", **options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        for stream in ("stdin", "stdout", "stderr"):
            options.setdefault(stream, subprocess.PIPE)
        head = ["-c", program] if program else ["-m", "strata_core"]
        child = subprocess.Popen([sys.executable, *head, *args], env=environment, **options)
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def run_strata(process: Callable[..., Any]) -> Callable[..., Result]:
    """Run the command as a process of its own, to its end."""

    def run(*args: str, stdin: bytes = b"", **options: Any) -> Result:
        child = process(*args, **options)
        out, err = child.communicate(stdin, timeout=240)
        return Result(child.returncode, (out or b"").decode(), (err or b"").decode())

    return run
