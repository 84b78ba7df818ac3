"""The example distributions use public interfaces only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = ("errors", "hookspecs", "interfaces", "machine", "sources.fetching")
"""What a plugin may import of strata_core; its tests, and its commands, also the rest below."""
PUBLIC_TO_TESTS = (*PUBLIC, "testing", "checkpoint.open", "cli.main")
MODULES = sorted((ROOT / "docs" / "examples").glob("*/*/*.py"))


def imported(source: str) -> set[str]:
    """Modules of strata_core that a module imports, without `strata_core.`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {n.partition(".")[2] for n in found if n.partition(".")[0] == "strata_core"}


def outside(source: str, allowed: tuple[str, ...]) -> set[str]:
    return {
        name
        for name in imported(source)
        if not any(name == one or name.startswith(f"{one}.") for one in allowed)
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_what_is_public(path: Path) -> None:
    allowed = PUBLIC_TO_TESTS if path.parent.name == "tests" else PUBLIC
    assert not outside(path.read_text("utf-8"), allowed)


def test_there_are_examples() -> None:
    assert {path.parent.name for path in MODULES} >= {"strata_source_fsspec", "strata_source_zstd"}


@pytest.mark.parametrize("line", ["import strata_core.engine", "from strata_core.plan import plan"])
def test_other_imports_are_found(line: str) -> None:
    assert outside(line, PUBLIC_TO_TESTS)
