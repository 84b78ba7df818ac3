"""The import order is one-way, the environment has one reader, core names no vendor."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "strata_core"
MODULES = sorted(CORE.rglob("*.py"))

LAYERS = [
    {
        "errors", "interfaces", "abilities", "runtime", "hookspecs", "plugins", "selection",
        "machine", "installed", "setting", "setting_device", "setting_memory", "setting_plugins",
        "setting_table", "config",
        "builtin", "plugin_report", "demo",
    },
    {"checkpoint"},
    {"pack"},
    {"plan"},
    {"memory"},
    {"sources"},
    {"cache"},
    {"kernels"},
    {"sampler", "tokenizer"},
    {"model"},
    {"engine"},
    {"api"},
    {"verify"},
    {"cli"},
]  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Outside the order: the package itself, its runner, and the suites that use all of it.
FREE = {"__init__", "__main__", "testing"}

# `builtin` names the modules behind its records in functions that run when something is built.
LAZY = {"builtin"}


def problems(paths: Sequence[Path], check: Callable[[Path], Sequence[object]]) -> dict[str, object]:
    """What a check finds, by file; one test for all files takes a fraction of one for each."""
    found = {str(path.relative_to(ROOT)): check(path) for path in paths}
    return {name: wrong for name, wrong in found.items() if wrong}


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def part(path: Path) -> str:
    first = path.relative_to(CORE).parts[0]
    return first.removesuffix(".py")


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where a name comes from"
        module = node.module or ""
        yield from (f"{module}.{alias.name}" for alias in node.names)


def reached(tree: ast.Module, *, lazily: bool) -> Iterator[tuple[str, int]]:
    """(top-level part of strata_core, line) of each import that runs; typing ones do not count."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not lazily and isinstance(node, ast.FunctionDef):
            continue
        for name in imported(node):
            parts = name.split(".")
            if parts[0] == "strata_core" and len(parts) > 1:
                yield parts[1], node.lineno
        todo.extend(ast.iter_child_nodes(node))


def wrong_imports(source: str, own: str) -> list[str]:
    tree = ast.parse(source)
    return [
        f"line {line}: {own} imports {other}"
        for other, line in reached(tree, lazily=own not in LAZY)
        if other in RANK and RANK[other] > RANK[own]
    ]


def test_every_part_has_a_place_in_the_import_order() -> None:
    assert {part(path) for path in MODULES} - FREE <= RANK.keys()


def test_imports_go_one_way() -> None:
    paths = [path for path in MODULES if part(path) not in FREE]
    assert len(paths) > 100
    assert not problems(paths, lambda path: wrong_imports(text_of(path), part(path)))


@pytest.mark.parametrize(
    ("source", "own", "wrong"),
    [
        ("import strata_core.engine.step", "plan", 1),
        ("from strata_core import api", "engine", 1),
        ("def f():\n    from strata_core.cli import main", "api", 1),
        ("def f():\n    from strata_core.kernels.reference_backend import build", "builtin", 0),
        ("if TYPE_CHECKING:\n    from strata_core.kernels.program import Program", "interfaces", 0),
        ("from strata_core.errors import StrataError", "cli", 0),
    ],
)
def test_the_check_itself(source: str, own: str, wrong: int) -> None:
    assert len(wrong_imports(source, own)) == wrong


def environment_reads(source: str) -> list[int]:
    words = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & words)
    ]


def test_environment_has_one_reader() -> None:
    paths = [path for path in MODULES if path != CORE / "config.py"]
    assert not problems(paths, lambda path: environment_reads(text_of(path)))


def test_the_reader_is_found() -> None:
    assert environment_reads((CORE / "config.py").read_text("utf-8"))


# Words of one vendor's products. File formats (F16, Q4_K) and DESIGN's own words are none.
VENDORS = re.compile(
    r"cuda|nvidia|nvrtc|nvcuda|cupy|cublas|ptx\b|\bhip\b|hiprtc|hip_|rocm|amdhip|\bamd\b|\bwsl\b"
    r"|dxgk|metal\b|vulkan|radeon|geforce",
    re.IGNORECASE,
)
# An operating system's name, which the machine's facts hold; not a vendor of devices.
SYSTEM_WORDS = {"wsl"}


def vendor_words(source: str) -> list[str]:
    """Vendor names in names and strings, docstrings included."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING):
            words = {word.lower() for word in VENDORS.findall(token.string)}
            found += [f"line {token.start[0]}: {word}" for word in sorted(words - SYSTEM_WORDS)]
    return found


def test_core_names_no_vendor() -> None:
    assert not problems(MODULES, lambda path: vendor_words(text_of(path)))


@pytest.mark.parametrize("source", ["import cupy", "x = 'use CUDA1'", "def hip_build(): ..."])
def test_vendor_words_are_found(source: str) -> None:
    assert vendor_words(source)


LONGEST_FILE = 450
LONGEST_FUNCTION = 60
SOURCES = sorted(
    path
    for folder in ("strata_core", "plugins", "tests", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if not {".venv", "build", "dist", "__pycache__"} & set(path.parts)
)


def test_files_stay_small() -> None:
    assert len(SOURCES) > 500
    lines = {str(path.relative_to(ROOT)): len(text_of(path).splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def long_functions(source: str) -> list[str]:
    """Functions of more lines than fit a screen, decorators not counted."""
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]


def test_functions_stay_small() -> None:
    assert not problems(SOURCES, lambda path: long_functions(text_of(path)))


@pytest.mark.parametrize(("lines", "found"), [(60, 0), (61, 1)])
@pytest.mark.parametrize("head", ["def f():", "async def f():", "class C:\n  def f(self):"])
def test_long_functions_are_found(head: str, lines: int, found: int) -> None:
    assert len(long_functions(head + "\n    pass" * (lines - 1))) == found
