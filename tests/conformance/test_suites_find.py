"""Every broken part is found, by a test whose name says what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BROKEN = (HERE / "broken_parts.py", HERE / "broken_runtimes.py")
ROOT = HERE.parents[1]

# Run as a plugin of the inner pytest: keeps the tests that must find something, and writes
# {class: [failed tests]} to the file it is given. What is found need not be made small.
RECORDER = """
import json, os
import pytest
from hypothesis import Phase, settings
settings.register_profile("found", phases=[Phase.explicit, Phase.generate])
settings.load_profile("found")
failed = {}
def pytest_collection_modifyitems(items):
    items[:] = [i for i in items if i.name.split("[")[0] == getattr(i.cls, "FOUND_BY", "")]
    failed.update({i.cls.__name__: [] for i in items})
def pytest_runtest_setup(item):
    if failed[item.cls.__name__]:
        pytest.skip("it is found already")
def pytest_runtest_logreport(report):
    if report.when == "call" and report.failed:
        _, kind, test = report.nodeid.split("::")
        failed[kind].append(test.split("[")[0])
def pytest_sessionfinish():
    with open(os.environ["BROKEN_PARTS_RESULT"], "w") as file:
        json.dump(failed, file)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The failed tests of every broken part."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "recorder.py").write_text(RECORDER)
    options = [
        "-o",
        "python_classes=[A-Z]*",
        "-o",
        "addopts=",
        "-p",
        "recorder",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=no",
    ]
    paths = os.pathsep.join([str(folder), str(ROOT)])
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, *map(str, BROKEN)],
        cwd=folder,
        # With CI set, pytest writes whole differences out, which must not take long either.
        env={**os.environ, "PYTHONPATH": paths, "BROKEN_PARTS_RESULT": str(result), "CI": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads(result.read_text())
    return found


def broken_parts() -> dict[str, str]:
    """Name of every broken part with the test that must find it."""
    parts, name = {}, ""
    for line in "".join(file.read_text() for file in BROKEN).splitlines():
        if line.startswith("class "):
            name = line.removeprefix("class ").split("(")[0]
        elif line.startswith("    FOUND_BY = "):
            parts[name] = line.split('"')[1]
    return parts


@pytest.mark.parametrize(("part", "test"), broken_parts().items())
def test_a_broken_part_is_found(failed: dict[str, list[str]], part: str, test: str) -> None:
    assert test in failed[part], f"{part} failed only in {failed[part]}"


def test_there_are_broken_parts_of_every_role() -> None:
    kinds = {"SourceSuite", "AllocatorSuite", "BackendSuite", "Broken"}
    lines = "".join(file.read_text() for file in BROKEN)
    assert kinds == {suite for suite in kinds if f"({suite}):\n    FOUND_BY" in lines}
    assert len(broken_parts()) >= 24
