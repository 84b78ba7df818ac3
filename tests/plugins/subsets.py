"""Run core's tests with every subset of the plugins installed, and with the next interface version.

    python tests/plugins/subsets.py                      # eight environments, then interface 1.1
    python tests/plugins/subsets.py --only cuda+wsl core next
    python tests/plugins/subsets.py --offline            # borrow the packages of this environment
    python tests/plugins/subsets.py --part tests         # everything instead of the quick part

Each run has an environment of its own and a copy of the tree without the folder `plugins`, so that
a plugin is there only where it is installed. `next` is core with a minor interface version more,
and all plugins, which were written for the one before. Prints one line a run; exit code 1 if one
failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("cuda", "hip", "wsl")
SUBSETS = {
    "+".join(names) or "core": names
    for count in range(len(PLUGINS) + 1)
    for names in itertools.combinations(PLUGINS, count)
}
NEXT = "next"

QUICK = (
    "tests/framework",
    "tests/plugins/test_subsets.py",
    "tests/plugins/test_tutorial.py",
    "tests/cli/test_commands.py",
    "tests/cli/test_misbehaving_plugin.py",
    "tests/cli/test_plugin_settings.py",
    "tests/conformance/test_command.py",
)
"""What depends on which plugins are there, and every command once."""

FIXED = (
    "test_nothing_of_the_interface",
    "test_the_table_of_versions",
    "test_the_interface_version",
)
"""Tests that name this interface version, and so fail with the next one."""


def copy_tree(folder: Path, minor: bool) -> None:
    """The tree as core's source distribution has it; with `minor`, of the next interface."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    for name in ("strata_core", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "LICENSE", ROOT / "NOTICE"]:
        shutil.copy(file, folder)
    if minor:
        file = folder / "strata_core" / "interfaces.py"
        text, count = re.subn(
            r"^API = \((\d+), (\d+)\)$",
            lambda found: f"API = ({found[1]}, {int(found[2]) + 1})",
            file.read_text("utf-8"),
            flags=re.MULTILINE,
        )
        assert count == 1, "interfaces.API is not where it is looked for"
        file.write_text(text, "utf-8")


def make_environment(folder: Path, tree: Path, plugins: Sequence[str], offline: bool) -> Path:
    """An environment with core and `plugins`; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command.append("--disable-pip-version-check")
    # built elsewhere, so that no build folder is left in the repository
    copies = [
        Path(shutil.copytree(ROOT / "plugins" / name, folder / "projects" / name))
        for name in plugins
    ]
    if offline:
        (site,) = folder.glob("**/site-packages")
        (site / "borrowed.pth").write_text("\n".join(_site()) + "\n", "utf-8")
        command += ["--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, str(tree), *map(str, copies)], check=True)
    else:
        subprocess.run([*command, f"{tree}[test]", *map(str, copies)], check=True)
    return python


def run(name: str, plugins: Sequence[str], part: Sequence[str], offline: bool) -> bool:
    """One environment's tests; whether they passed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strata-subset-") as temporary:
        folder = Path(temporary)
        tree = folder / "tree"
        tree.mkdir()
        copy_tree(tree, minor=name == NEXT)
        python = make_environment(folder / "environment", tree, plugins, offline)
        command = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--basetemp={folder / 'temporary'}", "--override-ini=addopts="]
        command += ["--import-mode=importlib", "--tb=short"]
        if name == NEXT:
            command += ["-k", " and ".join(f"not {test}" for test in FIXED)]
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [*command, *part], cwd=tree, env=plain, capture_output=True, text=True, check=False
        )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    passed = done.returncode == 0
    if not passed:
        print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr)
    seconds = time.monotonic() - begin
    print(f"{name:14} {'passed' if passed else 'FAILED'}  {lines[-1]} ({seconds:.0f} s in all)")
    sys.stdout.flush()
    return passed


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SUBSETS, NEXT], default=[*SUBSETS, NEXT])
    parser.add_argument("--part", nargs="+", default=list(QUICK))
    parser.add_argument("--offline", action="store_true")
    given = parser.parse_args()
    here = [f"strata-{name}" for name in ("core", *PLUGINS)]
    if given.offline:
        found = {item.metadata["Name"] for item in metadata.distributions(path=_site())}
        if found & set(here):
            print(f"--offline needs an environment without {', '.join(here)}", file=sys.stderr)
            return 2
    plugins = {**SUBSETS, NEXT: PLUGINS}
    results = [run(name, plugins[name], given.part, given.offline) for name in given.only]
    return 0 if all(results) else 1


def _site() -> list[str]:
    return [path for path in sys.path if Path(path).name == "site-packages"]


if __name__ == "__main__":
    raise SystemExit(main())
