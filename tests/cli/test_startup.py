"""`strata --help` is quick, imports nothing heavy, and tells what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import click
import pytest

from strata_core import __version__
from strata_core.cli.main import COMMANDS, LATER, root

HEAVY = ("numpy", "tokenizers", "safetensors", "pluggy", "rich", "jinja2", "llvmlite", "numba")
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


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs the processor time of a child")
def test_help_takes_less_than_300_ms() -> None:
    # One thread that waits for nothing: on an idle machine its processor time is the time it
    # takes, and on a busy one this does not measure the others.
    times = []
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-m", "strata_core", "--help"], stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        times.append(used.ru_utime + used.ru_stime)
    assert min(times) < 0.3, times


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
