"""Real distributions: built as wheels, installed by pip into a folder, used by fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[2]

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = ["strata-core"]

[project.entry-points.strata]
{entry} = "{module}"

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]
"""


@frozen
class Result:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@frozen
class Place:
    """A folder that distributions are installed into, and the folder that commands run in."""

    site: Path
    folder: Path

    def start(
        self, *args: str, module: str = "strata_core", **variables: str
    ) -> subprocess.Popen[str]:
        """Start `python -m MODULE ARGS` beside what is installed, free of the tester's settings."""
        plain = {name: value for name, value in os.environ.items() if name[:7] != "STRATA_"}
        path = os.pathsep.join([str(self.site), str(ROOT)])
        none = str(self.site / "no-settings")
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env={**plain, "PYTHONPATH": path, "XDG_CONFIG_HOME": none, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, module: str = "strata_core", **variables: str) -> Result:
        """The same, to its end."""
        return ended(self.start(*args, module=module, **variables))

    def install(self, *wheels_or_folders: Path) -> None:
        """What `pip install` does with them, without a network and without dependencies."""
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        options += ["--disable-pip-version-check", "--target", str(self.site)]
        done = self.run("install", *options, *map(str, wheels_or_folders), module="pip")
        assert done.code == 0, done.err


def ended(process: subprocess.Popen[str]) -> Result:
    """The result of a process that is waited for; it is killed where it does not end."""
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Result(process.returncode, out, err)


def write_project(folder: Path, name: str, version: str, source: str) -> Path:
    """The folder of a distribution of one module; the entry point is NAME without `strata-`."""
    module = name.replace("-", "_")
    folder = folder / name
    folder.mkdir()
    entry = name.removeprefix("strata-")
    text = PROJECT.format(name=name, version=version, entry=entry, module=module)
    (folder / "pyproject.toml").write_text(text, "utf-8")
    (folder / f"{module}.py").write_text(source, "utf-8")
    return folder


def build_wheels(projects: Mapping[str, str], version: str, folder: Path) -> list[Path]:
    """A wheel for each name and source of `projects`."""
    from hatchling.builders.wheel import WheelBuilder

    wheels = folder / "wheels"
    for name, source in projects.items():
        builder = WheelBuilder(str(write_project(folder, name, version, source)))
        list(builder.build(directory=str(wheels), versions=["standard"]))
    return sorted(wheels.iterdir())
