"""`strata --help` is quick, imports nothing heavy, and tells what there is."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module

import click
import pytest

from strata_core import __version__
from strata_core.cli.main import COMMANDS, LATER, root

HEAVY = ("numpy", "tokenizers", "safetensors", "pluggy", "rich", "jinja2", "numba")
LISTING = """
import sys
from strata_core.cli.main import main
code = main(sys.argv[1:])
print("modules:", *sorted(sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["generate", "--help"], ["genrate"]])
def test_no_heavy_import(args: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LISTING, *args], capture_output=True, text=True)
    modules = done.stdout.rsplit("modules:", 1)[1].split()
    assert "strata_core.cli.main" in modules
    assert not {name.split(".")[0] for name in modules} & set(HEAVY)
    assert not [name for name in modules if name.startswith("strata_core.plugins")]


def test_help_takes_less_than_300_ms() -> None:
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "strata_core", "--help"], capture_output=True)
        times.append(time.perf_counter() - begin)
        if times[-1] < 0.3:
            return
    pytest.fail(f"the quickest of {len(times)} took {min(times):.3f} s")


def test_help_lists_the_commands_of_this_version(strata) -> None:
    result = strata("--help")
    assert result.code == 0
    listed = [line.split()[0] for line in result.out.split("Commands:")[1].splitlines() if line]
    assert listed[: len(COMMANDS)] == list(COMMANDS)
    assert not set(listed) & set(LATER)


def test_no_arguments_show_the_help(strata) -> None:
    assert strata() == strata("--help")


def test_version(strata) -> None:
    assert strata("--version").out == f"strata {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str, strata) -> None:
    result = strata(name, "--help")
    assert result.code == 0
    assert f"strata {name}" in result.out
    assert "--json" in result.out
    assert "--spec" not in result.out, "a setting of a later version is not shown"
    command = import_module(f"strata_core.cli.{COMMANDS[name][0]}").command_object
    assert command.name == name
    assert command is root.get_command(click.Context(root), name)
