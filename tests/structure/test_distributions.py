"""What is in the files that are uploaded: built as the build backend builds them."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    "strata_core": ROOT,
    **{f"strata_{name}": ROOT / "plugins" / name for name in ("cuda", "hip", "wsl")},
    **{
        f"strata_source_{name}": ROOT / "docs" / "examples" / f"strata-source-{name}"
        for name in ("fsspec", "zstd")
    },
}


def shipped(folder: Path, below: str) -> set[str]:
    """The files of a folder that belong into a distribution, relative to `folder`."""
    return {
        str(path.relative_to(folder))
        for path in (folder / below).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(params=PROJECTS)
def project(request: pytest.FixtureRequest) -> tuple[str, Path]:
    pytest.importorskip("hatchling")
    return request.param, PROJECTS[request.param]


def test_a_wheel_ships_the_whole_package_and_its_types(project, tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    name, folder = project
    (wheel,) = WheelBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = {item for item in archive.namelist() if ".dist-info/" not in item}
    assert names == shipped(folder, name)
    assert f"{name}/py.typed" in names


def test_a_source_distribution_ships_package_and_tests(project, tmp_path: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder

    name, folder = project
    (sdist,) = SdistBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        members = [item for item in archive.getmembers() if item.isfile()]
        names = {item.name.partition("/")[2] for item in members}
    assert names >= shipped(folder, name) | shipped(folder, "tests")
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names
    only = {"PKG-INFO", ".gitignore"}
    if folder != ROOT:
        assert names - shipped(folder, name) - shipped(folder, "tests") - only == {
            "pyproject.toml",
            "LICENSE",
            "README.md",
        }
