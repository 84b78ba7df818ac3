"""Plugins that are broken, slow or hostile break nothing but themselves, and are named.

Each is a distribution that is built and installed. The others are blocked, so that each is alone
with its sound neighbour; in one test all are there at once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hostile_plugins import HARMLESS, HOSTILE, NOT_LOADED, UNUSABLE, plugin
from installing import ROOT, Place, Result, build_wheels, ended

pytestmark = pytest.mark.plugin

VERSION = "7.3"
NAMED = [
    (name, role)
    for name in HOSTILE
    if name not in (*NOT_LOADED, *UNUSABLE, *HARMLESS)
    for role in ("source", "allocator", "backend")
    if (name, role) not in {("raises-when-asked", "source"), ("raises-when-asked", "allocator")}
]


LISTED = ("plugins", "--json", "--backend", "cpu", "--source", "neighbour")
PLANNED = ("plan", "model.gguf", "--json", "--source")

begun: dict[tuple[str, tuple[str, ...]], subprocess.Popen[str]] = {}
"""Commands that wait for a probe: begun before the first test, read by the test they are for."""


@pytest.fixture(scope="module")
def hostile(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The place with every hostile plugin, its neighbour and a copy of the model `demo`."""
    folder = tmp_path_factory.mktemp("projects")
    projects = {f"strata-{name}": source for name, source in HOSTILE.items()}
    projects["strata-neighbour"] = plugin("neighbour")
    place.install(*build_wheels(projects, VERSION, folder))
    shutil.copy(ROOT / "strata_core" / "demo" / "kjv-Q4_0.gguf", place.folder / "model.gguf")
    name = "hang-in-probe"
    for call in (LISTED, (*PLANNED, name)):
        begun[name, call] = place.start(*call, STRATA_BLOCK_PLUGINS=alone(name))
    yield place
    for process in begun.values():
        process.kill()
        process.communicate()
    begun.clear()


def alone(name: str) -> str:
    """What blocks all plugins but `name` and the neighbour."""
    return ",".join({*HOSTILE, "cuda", "hip", "wsl", "fsspec", "zstd"} - {name})


def commands(place: Place, name: str, *calls: Sequence[str]) -> list[Result]:
    """The results of commands that run at the same time, beside `name` and the neighbour."""
    running = [
        begun.pop((name, tuple(call)), None) or place.start(*call, STRATA_BLOCK_PLUGINS=alone(name))
        for call in calls
    ]
    return [ended(process) for process in running]


def test_the_help_imports_none_of_them(hostile: Place) -> None:
    for call in (["--help"], ["generate", "--help"]):
        result = hostile.run(*call)
        assert (result.code, result.err) == (0, "")
        assert "--help" in result.out


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_else_breaks(hostile: Place, name: str) -> None:
    (listed,) = commands(hostile, name, LISTED)
    assert listed.code == 0, listed.err
    report = listed.document
    assert report["selections"]["source"]["name"] == "neighbour"
    origin = {"distribution": f"strata-{name}", "version": VERSION}
    broken = [item for item in report["broken"] if item.items() >= origin.items()]
    assert [item["stage"] for item in broken] == [NOT_LOADED[name] for _ in broken]
    assert len(broken) == (name in NOT_LOADED)
    for role in ("backends", "allocators", "sources"):
        records = {item["name"]: item for item in report[role]}
        assert records["neighbour"]["usable"]
        if name in NOT_LOADED:
            assert name not in records
            continue
        assert records[name].items() >= origin.items()
        assert records[name]["usable"] is (name not in UNUSABLE)
        assert records[name].get("reason") == UNUSABLE.get(name)


@pytest.mark.parametrize("name", [*NOT_LOADED, *UNUSABLE])
def test_what_cannot_be_used_is_told_with_its_distribution(hostile: Place, name: str) -> None:
    (result,) = commands(hostile, name, [*PLANNED, name])
    assert result.code == 2
    assert f"strata-{name} {VERSION}" in " ".join(result.document["error"].values())


@pytest.mark.parametrize(("name", "role"), NAMED)
def test_what_was_named_is_told_with_its_distribution(hostile: Place, name: str, role: str) -> None:
    call = ["generate", "model.gguf", "In the", "-n", "2", "-q", "--json", f"--{role}", name]
    if role != "backend":
        call += ["--backend", "reference"]
    if role != "source":
        call += ["--source", "arena"]
    (result,) = commands(hostile, name, call)
    assert result.code in (1, 2)
    error = result.document["error"]
    assert all(error.values()), error
    assert f"strata-{name} {VERSION}" in " ".join(error.values())
    assert "Traceback" not in result.err


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_its_work_all_the_same_gives_the_same_tokens(hostile: Place, name: str) -> None:
    call = ["generate", "model.gguf", "In the", "-n", "4", "--json", "--backend", "cpu"]
    ours, others = commands(hostile, name, [*call, "--source", name], [*call, "--source", "arena"])
    assert ours.code == 0, ours.err
    assert ours.document["token_ids"] == others.document["token_ids"]
    assert ("noise" in ours.err) is (name == "prints")


def test_all_of_them_at_once(hostile: Place) -> None:
    block = ["cuda", "hip", "wsl", "fsspec", "zstd", "slow-import", "hang-in-probe"]
    call = ["generate", "model.gguf", "In the", "-n", "1", "--json"]
    call += ["--source", "neighbour", "--allocator", "neighbour", "--backend", "neighbour"]
    result = hostile.run(*call, STRATA_BLOCK_PLUGINS=",".join(block))
    assert result.code == 0, result.err
    assert {item["name"] for item in result.document["selections"]} == {"neighbour"}
