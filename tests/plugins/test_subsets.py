"""Core beside every subset of this repository's plugins, and of this and the next interface.

Distributions are blocked as a user blocks them; `subsets.py` has the same with environments of
their own, in which a plugin is there only where it is installed.
"""

from __future__ import annotations

import itertools
import json
from importlib import metadata
from pathlib import Path

import pytest

import strata_core.machine
from strata_core import setting_plugins
from strata_core.cli.main import main
from strata_core.hookspecs import hookimpl
from strata_core.interfaces import API, SourceRecord, Usable
from strata_core.plugins import loader, records

ROOT = Path(__file__).parents[2]
OFFERED = {
    "cuda": {"backends": {"cuda"}, "allocators": {"cuda-pinned"}},
    "hip": {"backends": {"hip"}, "allocators": {"hip-pinned"}},
    "wsl": {"backends": set(), "allocators": {"wsl"}},
}
CORE = {
    "backends": {"cpu", "reference", "sim"},
    "allocators": {"host", "sim-pinned"},
    "sources": {"arena", "mmap", "sliced-pinned", "tiered-file"},
}
SUBSETS = [
    names for count in range(len(OFFERED) + 1) for names in itertools.combinations(OFFERED, count)
]
NEXT = (API[0], API[1] + 1)

pytestmark = pytest.mark.skipif(
    not (ROOT / "plugins").is_dir(), reason="a source distribution of core has no plugins folder"
)


@pytest.fixture(params=[API, NEXT], ids=["this interface", "the next interface"])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The interface version that core has in this test."""
    monkeypatch.setattr(records, "API", request.param)
    monkeypatch.setattr(setting_plugins, "API", request.param)
    return request.param


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_machine) -> None:
    """All three plugins are what is installed, on a machine without a graphics card."""
    found = []
    for name in OFFERED:
        info = tmp_path / f"strata_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: strata-{name}\nVersion: 0.1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[strata]\n{name} = strata_{name}.plugin\n")
        found += metadata.PathDistribution(info).entry_points
        monkeypatch.syspath_prepend(str(ROOT / "plugins" / name))
    monkeypatch.setattr(loader, "entry_points_of", lambda group: (found, []))
    machine = make_machine()
    monkeypatch.setattr(strata_core.machine, "read_machine", lambda: machine)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("api", "installed")
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "core")
def test_every_subset(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_BLOCK_PLUGINS", ",".join(sorted(set(OFFERED) - set(names))))
    report = document(capsys, "plugins")
    assert report["broken"] == []
    for role, own in CORE.items():
        offered = own.union(*(OFFERED[name].get(role, set()) for name in names))
        assert {item["name"] for item in report[role]} == offered
    assert report["selections"]["backend"]["name"] == "cpu"
    assert report["selections"]["allocator"]["name"] == "host"
    assert {item["name"] for item in report["blocked"]} == set(OFFERED) - set(names)
    planned = document(capsys, "plan", "demo", "--source", "mmap")
    assert [item["name"] for item in planned["selections"]] == ["cpu", "host", "mmap"]


class Newer:
    """Written for the next interface."""

    @staticmethod
    @hookimpl
    def strata_expert_sources() -> list[SourceRecord]:
        """One source."""
        probe = lambda machine: Usable("")  # noqa: E731
        build = lambda context: None  # noqa: E731
        return [SourceRecord(name="newer", summary="S", api=NEXT, probe=probe, build=build)]


def test_a_plugin_of_the_next_interface(
    api: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = metadata.EntryPoint("newer", "nowhere", "strata")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: Newer)
    catalogue = loader.load_plugins([entry_point])
    offered = {offer.name for offer in catalogue.sources}
    if api == NEXT:
        assert "newer" in offered
        return
    (broken,) = catalogue.broken
    assert (broken.stage, broken.offered) == ("api", (("source", "newer"),))
    theirs, ours = (".".join(map(str, version)) for version in (NEXT, API))
    assert f"interface version {theirs}; strata-core " in broken.error
    assert broken.error.endswith(f"has {ours}")
    assert offered == CORE["sources"]
