"""docs/troubleshooting.md has the first line of every error and degradation, by class.

The lines are collected from the source text of core and of the plugins in this repository: the
first argument of each call of a class. A row's text has `...` where a name or a number stands. A
line that is made of nothing but what another part said is not in the source; it has no row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_core import errors

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CLASSES = [*errors.ERRORS, errors.Degradation.__name__]
SOURCES = sorted([*(ROOT / "strata_core").rglob("*.py"), *ROOT.glob("plugins/*/strata_*/*.py")])
NAMING = ("naming",)
"""Functions that make an error of a class that they are given; their first argument is its line."""

HOLE = "\N{WHITE SQUARE}"
"""Stands for a name or a number in a collected line."""


def lines_of(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The texts that an expression may have, as far as the source says; a hole elsewhere."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else HOLE for p in node.values)
    elif isinstance(node, ast.IfExp):
        yield from lines_of(node.body, scope)
        yield from lines_of(node.orelse, scope)
    elif isinstance(node, ast.Name):
        for item in ast.walk(scope):
            targets = item.targets if isinstance(item, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == node.id for t in targets):
                yield from lines_of(item.value, scope)


def collected(source: str) -> Iterator[tuple[str, str]]:
    """(class, line) of each error and degradation that a module makes."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for scope in functions:
        for node in ast.walk(scope):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            name, given = node.func.id, list(node.args)
            given += [item.value for item in node.keywords if item.arg == "what"]
            if name in NAMING and given:
                kind = ast.unparse(node.args[2]) if len(node.args) > 2 else "PluginError"
                yield from ((kind, line) for line in lines_of(given[0], scope))
            elif name in CLASSES and given:
                yield from ((name, line) for line in lines_of(given[0], scope))


def section(name: str) -> str:
    (found,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    return found


def patterns(name: str) -> list[str]:
    """The texts in the first column of a class's table."""
    rows = re.findall(r"^\| (`.*?`) \|", section(name), re.M)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


def fits(pattern: str, line: str) -> bool:
    """Whether a collected line is of the family of a row's text."""
    return re.fullmatch(re.escape(pattern).replace(re.escape("..."), ".*"), line) is not None


FOUND = sorted({item for path in SOURCES for item in collected(path.read_text("utf-8"))})


def test_every_class_has_a_section() -> None:
    assert sorted(re.findall(r"^## (\w+)$", TEXT, re.M)) == sorted(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_line_is_explained(name: str) -> None:
    known = patterns(name)
    lines = [line for kind, line in FOUND if kind == name and re.search("[a-z]", line)]
    missing = [line for line in lines if not any(fits(pattern, line) for pattern in known)]
    assert not missing, f"add to the table of {name} in docs/troubleshooting.md: {missing}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_row_is_about_something(name: str) -> None:
    if not (ROOT / "plugins").is_dir():
        pytest.skip("a source distribution of core has no plugins, whose lines are explained too")
    lines = [line for kind, line in FOUND if kind == name]
    stale = [text for text in patterns(name) if not any(fits(text, line) for line in lines)]
    assert not stale, f"nothing says so any more: {stale}"


@pytest.mark.parametrize("name", CLASSES)
def test_a_row_says_enough_to_be_found(name: str) -> None:
    for text in patterns(name):
        assert len(re.findall("[a-z]", text)) >= 2, text
    for row in re.findall(r"^\| `.*$", section(name), re.M):
        assert row.count(" | ") == 2, row


def test_what_is_collected() -> None:
    assert len(FOUND) > 200
    assert {kind for kind, _ in FOUND} == set(CLASSES)
    module = (
        'def f(x):\n    what = f"no {x}"\n    raise UsageError(what, "", "")\n'
        'def g():\n    with naming("it broke", (), EngineError): pass\n'
    )
    assert list(collected(module)) == [("UsageError", f"no {HOLE}"), ("EngineError", "it broke")]


@pytest.mark.parametrize(
    ("pattern", "line", "fit"),
    [
        ("...: tensor ... is missing", f"{HOLE}: tensor {HOLE} is missing", True),
        ("... is missing", "shards are missing", False),
        ("interrupted", "interrupted", True),
    ],
)
def test_what_fits(pattern: str, line: str, fit: bool) -> None:
    assert fits(pattern, line) is fit
