"""docs/interface.md says what plugins may import and what a version promises; both are kept."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from interface_shape import breaks, shape

from strata_core import __version__, abilities, interfaces

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "interface.md").read_text("utf-8")
Names = frozenset[str] | None

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*/*/*.py"))
PLUGINS = sorted((ROOT / "plugins").glob("*/*/*.py"))


def tables() -> list[dict[str, Names]]:
    """The three tables of imports: module -> the names that are given, None for all."""
    section = TEXT.split("## What may be imported")[1].split("\n## ")[0]
    found = []
    for table in re.findall(
        r"\| module \| names \| for \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", section
    ):
        rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()]
        found.append(
            {
                module.strip("`"): None if names == "all" else frozenset(re.findall(r"\w+", names))
                for module, names in rows
            }
        )
    return found


EVERYBODY, DEVICES, TESTS = tables()


def imported(source: str) -> list[tuple[str, str]]:
    """(module, name) of each import of core; the name is "" where the module itself is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "strata_core"]


def outside(source: str, *allowed: dict[str, Names]) -> list[str]:
    """What a module imports that it may not, with what is right about it."""
    known = {module: names for table in allowed for module, names in table.items()}

    def fine(module: str, name: str) -> bool:
        if f"{module}.{name}" in known:  # the module itself
            return True
        if module in known:
            names = known[module]
            return names is None or name in names
        return any(
            names is None and module.startswith(f"{place}.") for place, names in known.items()
        )

    return [f"{module}: {name}" for module, name in imported(source) if not fine(module, name)]


@pytest.mark.parametrize("path", [*EXAMPLES, *PLUGINS], ids=lambda p: str(p.relative_to(ROOT)))
def test_plugins_import_what_is_named(path: Path) -> None:
    allowed = [EVERYBODY]
    if path in PLUGINS:
        allowed.append(DEVICES)
    if path.parent.name == "tests" or path.name == "command.py":
        allowed.append(TESTS)
    assert outside(path.read_text("utf-8"), *allowed) == []


def test_there_are_plugins_and_examples() -> None:
    folders = {path.parent.name for path in (*EXAMPLES, *PLUGINS)}
    assert folders >= {"strata_source_fsspec", "strata_source_zstd"}
    if (ROOT / "plugins").is_dir():
        assert folders >= {"strata_cuda", "strata_hip", "strata_wsl"}


@pytest.mark.parametrize(
    "line",
    [
        "import strata_core.engine",
        "from strata_core.plan import plan",
        "from strata_core import engine",
        "from strata_core.config import resolve",
        "from strata_core.memory.pinned import other",
    ],
)
def test_other_imports_are_found(line: str) -> None:
    assert outside(line, EVERYBODY, DEVICES, TESTS)


def test_what_is_named_is_there() -> None:
    for table in (EVERYBODY, DEVICES, TESTS):
        for module, names in table.items():
            there = vars(importlib.import_module(module))
            assert names is None or names <= there.keys(), module


@pytest.mark.skipif(not PLUGINS, reason="a source distribution of core has no plugins folder")
def test_what_is_named_for_devices_is_used() -> None:
    used = [item for path in PLUGINS for item in imported(path.read_text("utf-8"))]
    for module, names in DEVICES.items():
        assert module in {module for module, _ in used}
        assert not names or names <= {name for place, name in used if place == module}


# --- versions ----------------------------------------------------------------------------------


def test_nothing_of_the_interface_is_gone_or_changed() -> None:
    written = (Path(__file__).parent / "interface.txt").read_text("utf-8").splitlines()
    assert interfaces.API == (1, 0), "a new version has a list of its own"
    found = breaks(written, shape())
    assert not found, (
        "this would break plugins of this version. While no release has it yet, write the list "
        "anew: python tests/plugins/interface_shape.py > tests/plugins/interface.txt"
    )


VIEW = "strata_core.interfaces:View"
SOURCE = "strata_core.interfaces:Source"


@pytest.mark.parametrize(
    ("taken", "added", "found"),
    [
        (None, "strata_core.interfaces class Extra", 0),
        (None, "strata_core.interfaces:Extra supply method", 0),
        (None, f"{VIEW} 5 more: int = ...", 0),
        (None, f"{VIEW} 5 more: int", 1),
        (None, f"{SOURCE} supply peek", 1),
        (None, f"{SOURCE}.view 2 hint: int = ...", 0),
        (None, f"{SOURCE}.view 2 hint: int", 1),
        (f"{SOURCE} supply view", None, 1),
        (f"{VIEW} 1 in_ram: bool", f"{VIEW} 2 in_ram: bool", 2),
    ],
)
def test_what_breaks_is_found(taken: str | None, added: str | None, found: int) -> None:
    now = shape()
    assert taken is None or taken in now
    changed = [line for line in now if line != taken] + ([added] if added else [])
    assert len(breaks(now, changed)) == found


def test_the_table_of_versions_ends_with_this_one() -> None:
    section = TEXT.split("## Compatibility")[1]
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d., to]+) \|$", section, re.M)
    major, minor = interfaces.API
    assert rows[-1][:2] == (__version__.rpartition(".")[0], f"{major}.{minor}")
    assert rows[-1][2].endswith(f"{major}.{minor}")
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})


@pytest.mark.skipif(not PLUGINS, reason="a source distribution of core has no plugins folder")
@pytest.mark.parametrize("folder", sorted({path.parents[1] for path in (*PLUGINS, *EXAMPLES)}))
def test_what_is_in_this_repository_fits_this_core(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    (needs,) = [item for item in project["dependencies"] if item.startswith("strata-core")]
    assert needs == "strata-core>=0.1,<0.2"


# --- contracts ---------------------------------------------------------------------------------

PROTOCOLS = {
    name: kind
    for module in (interfaces, abilities)
    for name, kind in vars(module).items()
    if getattr(kind, "_is_protocol", False) and kind.__module__ == module.__name__
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_says_who_calls_it(name: str) -> None:
    own = PROTOCOLS[name].__doc__ or ""
    assert re.search(r"thread|immutable", own), f"{name} does not say which thread calls it"
    for method, member in vars(PROTOCOLS[name]).items():
        if method[0] != "_" and name != "Progress":
            assert member.__doc__, f"{name}.{method} has no contract"


def test_what_holds_everywhere_stands_at_the_top() -> None:
    for word in ("bytes", "addresses", "thread", "raises", "closed"):
        assert word in interfaces.__doc__.split("Unless a docstring says otherwise")[1]
