"""A source plugin that prints, raises, exits or builds nothing: what the command makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PLUGIN = """
import os

from attrs import evolve

from strata_core import builtin
from strata_core.hookspecs import hookimpl
from strata_core.interfaces import Usable
from strata_core.sources.arena import Arena

TROUBLE = os.environ["STRATA_TEST_TROUBLE"]
print("noise while importing")


def trouble(place):
    print("noise in", place)
    where, _, what = TROUBLE.partition(" ")
    if where == place:
        raise {"raises": RuntimeError("boom"), "exits": SystemExit(5)}[what]


class Source(Arena):
    def view(self, expert):
        trouble("view")
        return super().view(expert)

    def close(self):
        super().close()
        trouble("close")


def build(context):
    trouble("build")
    if TROUBLE == "build nothing":
        return None
    return Source(context.experts, context.allocator, context.progress)


def probe(machine):
    print("noise while probing")
    return Usable("")


@hookimpl
def strata_expert_sources():
    arena = next(record for record in builtin.strata_expert_sources() if record.name == "arena")
    return [evolve(arena, name="unruly", build=build, probe=probe)]
"""
CALL = ("generate", "demo", "In the", "-n", "2", "-q", "--source", "unruly")

# trouble: exit code, what the error says
TROUBLES = {
    "none": (0, ""),
    "build raises": (2, "source unruly of strata-unruly 1.0 did not start"),
    "build exits": (2, "source unruly of strata-unruly 1.0 did not start"),
    "build nothing": (2, "source unruly of strata-unruly 1.0 did not start"),
    "view raises": (1, "RuntimeError: boom"),
    "view exits": (1, "SystemExit: 5"),
    "close raises": (1, "boom"),
    "close exits": (1, "SystemExit"),
}


@pytest.fixture
def unruly(tmp_path: Path, run_strata):
    """Run the command beside the plugin; `trouble` says what it does."""
    site = tmp_path / "site"
    info = site / "strata_unruly-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strata-unruly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[strata]\nunruly = strata_unruly\n")
    (site / "strata_unruly.py").write_text(PLUGIN)
    root = Path(__file__).parents[2]

    def run(trouble: str, *args: str):
        env = {"PYTHONPATH": f"{site}{os.pathsep}{root}", "STRATA_TEST_TROUBLE": trouble}
        return run_strata(*CALL, *args, env=env)

    return run


@pytest.mark.parametrize("trouble", TROUBLES)
def test_there_is_one_document(trouble: str, unruly) -> None:
    code, says = TROUBLES[trouble]
    result = unruly(trouble, "--json")
    assert result.code == code
    assert "Traceback" not in result.err
    document = result.document
    if trouble != "none":
        told = json.dumps(document.get("error", {})) + result.err
        assert "strata-unruly 1.0" in told
    if trouble == "none" or trouble.startswith("close"):
        # The error came after the document, so it is told beside it.
        assert document["reason"] == "length"
        assert says in result.err
    else:
        assert says in json.dumps(document["error"])
        assert all(document["error"].values())


def test_text_is_text_alone(unruly) -> None:
    result = unruly("none")
    assert result.code == 0
    assert "noise" not in result.out
    for place in ("while importing", "while probing", "in build", "in view", "in close"):
        assert f"noise {place}" in result.err
