"""Options that a plugin adds, through the command as a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PLUGIN = """
from attrs import evolve

from strata_core import builtin
from strata_core.hookspecs import hookimpl
from strata_core.sources.arena import build as build_arena


def build(context):
    print("building with", context.options["far_url"], context.options["far_retries"])
    return build_arena(context)


@hookimpl
def strata_expert_sources():
    arena = next(record for record in builtin.strata_expert_sources() if record.name == "arena")
    return [evolve(arena, name="far", build=build)]
"""
SETTINGS = """
api = [1, 0]
[url]
kind = "text"
metavar = "URL"
help = "Where it is."
[retries]
kind = "integer"
high = 9
default = 5
help = "How often."
"""
CALL = ("generate", "demo", "In the", "-n", "1", "-q")


@pytest.fixture
def far(tmp_path: Path, run_strata):
    """Run the command beside the plugin, whose package says so when it is imported."""
    site = tmp_path / "site"
    package = site / "strata_far"
    package.mkdir(parents=True)
    info = site / "strata_far-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strata-far\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[strata]\nfar = strata_far.plugin\n[strata.settings]\nfar = strata_far\n"
    )
    (package / "__init__.py").write_text("import sys\nprint('IMPORTED', file=sys.stderr)\n")
    (package / "plugin.py").write_text(PLUGIN)
    file = package / "settings.toml"
    file.write_text(SETTINGS)
    root = Path(__file__).parents[2]

    def run(*args: str, broken: bool = False, **env: str):
        if broken:
            file.write_text("api = [1, 0]\n[url]\nkind = 'colour'\nhelp = 'x'\n")
        return run_strata(*args, env={"PYTHONPATH": f"{site}{os.pathsep}{root}", **env})

    return run


def test_help_lists_its_options_and_imports_nothing(far) -> None:
    shown = far("generate", "--help")
    assert shown.code == 0
    assert "--far-url URL" in shown.out
    assert "Where it is. (strata-far 1.5)" in " ".join(shown.out.split())
    assert "Plugins:" in shown.out
    assert "IMPORTED" not in shown.err
    assert "--far-url" not in far("inspect", "--help").out
    assert "--far-url" not in far("--help").out


def test_the_values_reach_the_plugin(far) -> None:
    result = far(*CALL, "--source", "far", "--far-url", "x:y", STRATA_FAR_RETRIES="3")
    assert result.code == 0, result.err
    assert "building with x:y 3" in result.err


def test_a_wrong_value_is_an_error_that_names_the_distribution(far) -> None:
    result = far(*CALL, "--source", "far", "--far-retries", "99")
    assert result.code == 2
    assert "--far-retries" in result.err
    assert "strata-far 1.5 declares it" in result.err


def test_an_option_of_a_plugin_that_is_not_used_is_not_ignored(far) -> None:
    result = far(*CALL, "--far-url", "x")
    assert result.code == 2
    assert "--far-url has no effect here" in result.err
    assert "strata-far 1.5" in result.err
    document = far(*CALL, "--json", STRATA_FAR_URL="x").document
    assert any("far_url" in item["what"] for item in document["degradations"])


def test_a_typing_mistake_is_answered_with_the_option(far) -> None:
    result = far("generate", "demo", "--far-ulr", "x")
    assert result.code == 2
    assert "did you mean '--far-url'?" in result.err


def test_broken_settings_are_listed_and_break_nothing(far) -> None:
    shown = far("generate", "--help", broken=True)
    assert shown.code == 0
    assert "--far-" not in shown.out
    listed = json.loads(far("plugins", "--json").out)
    (broken,) = listed["broken"]
    assert (broken["distribution"], broken["version"]) == ("strata-far", "1.5")
    assert broken["stage"] == "settings"
    assert "kind must be one of" in broken["error"]
    assert "far" in {item["name"] for item in listed["sources"]}
    assert far(*CALL).code == 0
    result = far("generate", "demo", "--far-url", "x")
    assert result.code == 2
    assert "strata-far 1.5 (far) declares settings that could not be read" in result.err


def test_blocking_the_plugin_unlists_its_broken_settings(far) -> None:
    listed = json.loads(far("plugins", "--json", broken=True, STRATA_BLOCK_PLUGINS="far").out)
    assert listed["broken"] == []


def test_the_settings_file_and_doctor_know_them(far, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('far_url = "z"\n')
    rows = json.loads(far("doctor", "--json", "--config", str(file)).out)["settings"]
    (row,) = [row for row in rows if row["key"] == "far_url"]
    assert (row["value"], row["origin"]) == ("z", f"file {file}")
