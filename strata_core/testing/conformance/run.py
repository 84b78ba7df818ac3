"""Run a suite on an installed record, in a process of its own, and report test by test.

A process of its own, because a part under test may print, change the folder, or end the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

from strata_core.errors import StrataError
from strata_core.interfaces import Role

Outcome = Literal["passed", "failed", "skipped"]

MODULE = """\
from strata_core.testing.conformance.installed import suites

TestConformance, *more = suites({role!r}, {name!r}, {model!r}, {plain!r}, {blocked!r}, {options!r})
for TestRuntime in more:
    pass
"""

RUNNER = """\
import json, sys

import pytest


class Recorder:
    def __init__(self):
        self.rows = {{}}

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        test, why = report.nodeid.split("::")[-1], ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr)
        elif report.skipped:
            why = report.longrepr[2].removeprefix("Skipped: ")
        have = self.rows.get(test)
        if have is None or have["outcome"] != "failed":
            self.rows[test] = {{"test": test, "outcome": report.outcome, "why": why}}


sys.path[:0] = {path!r}
recorder = Recorder()
pytest.main({arguments!r}, plugins=[recorder])
with open({result!r}, "w") as file:
    json.dump(list(recorder.rows.values()), file)
"""


@frozen
class Row:
    """One test of the suite: its name, how it ended, and why where it did not pass."""

    test: str
    outcome: Outcome
    why: str


@frozen
class Conformance:
    """The result of a suite on one record."""

    role: Role
    name: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether some tests ran and none failed."""
        return any(r.outcome == "passed" for r in self.rows) and not self.failed

    @property
    def failed(self) -> tuple[Row, ...]:
        """The tests that failed."""
        return tuple(r for r in self.rows if r.outcome == "failed")

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON document's members."""
        return {
            "role": self.role,
            "name": self.name,
            "passed": self.passed,
            "tests": [asdict(row) for row in self.rows],
        }


def run_conformance(
    role: Role,
    name: str,
    *,
    model: Path | None = None,
    plain: Path | None = None,
    blocked: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    timeout: float = 600.0,
) -> Conformance:
    """Run the suite of `role` on the installed record `name`.

    `plain` has the experts of `model` in a form that can be read without the source, where a plugin
    keeps those of `model` itself. `blocked` are plugins not to load, `options` settings by key,
    `timeout` seconds for the whole run. Raises StrataError where pytest or hypothesis is missing,
    where the record does not load, and where the run does not end.
    """
    with tempfile.TemporaryDirectory(prefix="strata-conformance-") as temporary:
        folder = Path(temporary)
        result = folder / "result.json"
        named = str(model.resolve()) if model is not None else None
        same = str(plain.resolve()) if plain is not None else None
        module = MODULE.format(
            role=role,
            name=name,
            model=named,
            plain=same,
            blocked=tuple(blocked),
            options=dict(options or {}),
        )
        (folder / "test_installed.py").write_text(module)
        output = _run(folder, result, timeout, f"{role} {name}")
        if not result.exists():
            raise StrataError(
                f"the conformance suite did not run on {role} {name}",
                _last_line(output),
                "`strata plugins` says whether the plugin loads",
            )
        rows = tuple(Row(**row) for row in json.loads(result.read_text()))
    if not rows:
        raise StrataError(
            f"the conformance suite did not run on {role} {name}",
            _last_line(output),
            "`strata plugins` says whether the plugin loads",
        )
    return Conformance(role, name, rows)


def _run(folder: Path, result: Path, timeout: float, subject: str) -> str:
    arguments = ["-q", "--tb=line", "-p", "no:cacheprovider", "-c", os.devnull]
    arguments += ["--rootdir", str(folder), str(folder / "test_installed.py")]
    path = [str(folder), *filter(None, sys.path)]
    runner = RUNNER.format(path=path, arguments=arguments, result=str(result))
    (folder / "runner.py").write_text(runner)
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter on a file written above
            [sys.executable, str(folder / "runner.py")],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StrataError(
            f"the conformance suite on {subject} did not end within {timeout:.0f} s",
            "a call of the part under test seems to hang",
            "run the suite from a test module with pytest to see which",
        ) from error
    return done.stdout + done.stderr


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
