"""No test's outcome depends on how busy the machine is.

A wall clock says how busy the machine was, not what the program did. A test waits for an event, has
a clock of its own (`clock=`, tests/cpu/test_hand_over.py), or measures processor time; a bound that
only guards against hanging is so generous that nothing comes near it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[2]
GENEROUS = 60.0
"""Seconds from which a bound guards against hanging alone."""

WALL_CLOCKS = {"monotonic", "perf_counter", "time"}
MEANT = {
    "tests/conformance/test_command.py": "a run that hangs is ended, however slow the machine",
    "docs/examples/strata-source-fsspec/tests/test_fsspec.py": "an answer that never comes",
}
"""Files with a short time-out that must run out: what is waited for never happens."""

FILES = sorted(
    file
    for folder in ("tests", "plugins", "docs/examples")
    for file in (ROOT / folder).rglob("*.py")
    if "tests" in file.relative_to(ROOT).parts
)


Names = dict[str, float]


def named(tree: ast.Module) -> Names:
    """The module's names that stand for a number."""
    return {
        target.id: value
        for node in tree.body
        if isinstance(node, ast.Assign) and (value := number(node.value, {})) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def number(node: ast.expr | None, names: Names) -> float | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    found = node.value if isinstance(node, ast.Constant) else None
    return float(found) if isinstance(found, int | float) else None


def reads_a_wall_clock(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in WALL_CLOCKS
        and isinstance(inner.func.value, ast.Name)
        and inner.func.value.id == "time"
        for inner in ast.walk(node)
    )


def asserted(node: ast.Assert, names: Names) -> Iterator[str]:
    """Comparisons of a wall clock's difference with a small upper bound."""
    for inner in ast.walk(node.test):
        if not isinstance(inner, ast.Compare):
            continue
        sides = [inner.left, *inner.comparators]
        for kind, (left, right) in zip(inner.ops, pairwise(sides), strict=True):
            if isinstance(kind, ast.Gt | ast.GtE):
                left, right = right, left
            most = number(right, names)
            if most is not None and most < GENEROUS and reads_a_wall_clock(left):
                yield f"asserts that something takes less than {most:g} s of a wall clock"


def awaited(node: ast.Call, names: Names) -> Iterator[str]:
    """Time-outs that a busy machine may come to."""
    bounds = [number(word.value, names) for word in node.keywords if word.arg == "timeout"]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name == "join" and len(node.args) == 1:
        bounds.append(number(node.args[0], names))
    for bound in bounds:
        if bound is not None and 0 < bound < GENEROUS:
            yield f"waits for {bound:g} s at most"


def found(source: str) -> list[str]:
    told, tree = [], ast.parse(source)
    names = named(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            told += [f"line {node.lineno} {what}" for what in asserted(node, names)]
        if isinstance(node, ast.Call):
            told += [f"line {node.lineno} {what}" for what in awaited(node, names)]
    return told


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert time.monotonic() - begin < 5", 1),
        ("assert 0.04 < time.perf_counter() - begin < 10", 1),
        ("assert 5 > time.time() - begin", 1),
        ("QUICK = 5.0\ndef f():\n    assert time.monotonic() - begin < QUICK", 1),
        ("WAIT = 20\nqueue.get(timeout=WAIT)\nthread.join(WAIT)", 2),
        ("assert time.monotonic() - begin >= 0.1", 0),
        ("assert time.thread_time() - begin < 2", 0),
        ("assert time.monotonic() - begin < 60", 0),
        ("thread.join(10)", 1),
        ("queue.get(timeout=20)", 1),
        ("subprocess.run(command, timeout=240)", 0),
        ("engine.join(0)", 0),
        ("', '.join(words)", 0),
    ],
)
def test_what_is_found(source: str, count: int) -> None:
    assert len(found(source)) == count


def test_no_test_is_in_a_hurry() -> None:
    assert len(FILES) > 200
    hurried = {
        str(file.relative_to(ROOT)): lines
        for file in FILES
        if (lines := found(file.read_text("utf-8")))
    }
    assert hurried.keys() == MEANT.keys(), {k: v for k, v in hurried.items() if k not in MEANT}


def test_examples_may_take_as_long_as_they_take() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
