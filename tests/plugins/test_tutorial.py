"""docs/write-a-plugin.md, followed word by word from an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from installing import ROOT, Place, Result

pytestmark = pytest.mark.plugin

TEXT = (ROOT / "docs" / "write-a-plugin.md").read_text("utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", TEXT, re.S))
STEPS = re.findall(r"```sh\n(.*?)```\n(?:[^`#]*?<!-- shows -->\n```text\n(.*?)```\n)?", TEXT, re.S)


def matches(shown: str, out: str) -> bool:
    """Whether output is what is shown; `...` stands for lines, or for a part of a line."""
    pattern = re.escape(shown).replace(re.escape("...\n"), "(?:.*\\n)*?")
    return re.fullmatch(pattern.replace(re.escape("..."), ".*?"), out) is not None


def execute(command: str, place: Place) -> Result:
    """A line of the page: what it says, with the Python that runs the tests."""
    words = shlex.split(command)
    if words == ["pip", "install", "."]:
        place.install(place.folder)
        return Result(0, "", "")
    if words[0] == "strata":
        return place.run(*words[1:], STRATA_BLOCK_PLUGINS="fsspec,zstd")
    assert words[:3] == ["python", "-m", "pytest"], f"{command} is no command of this page"
    return place.run(*words[3:], "-p", "no:cacheprovider", module="pytest")


def test_every_block_takes_part() -> None:
    kinds = re.findall(r"^```(\w*)\n.*?^```$", TEXT, re.M | re.S)
    assert kinds.count("text") == len([shown for _, shown in STEPS if shown])
    assert kinds.count("sh") == len(STEPS)
    assert len(FILES) == kinds.count("toml") + kinds.count("python") == 5


def test_the_plugin_is_short() -> None:
    code = [name for name in FILES if name.startswith("strata_share/") and name.endswith(".py")]
    assert sum(len(FILES[name].splitlines()) for name in code) <= 62
    assert len(FILES["strata_share/plugin.py"].splitlines()) <= 60


def test_a_reader_gets_what_is_shown(place: Place) -> None:
    assert list(place.folder.iterdir()) == []
    for name, content in FILES.items():
        file = place.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, "utf-8")
    environment, *steps = STEPS
    assert "python3 -m venv .venv" in environment[0]
    for block, shown in steps:
        for command in block.splitlines():
            result = execute(command, place)
            assert result.code == 0, result.out + result.err
        assert not shown or matches(shown, result.out), result.out


@pytest.mark.parametrize(
    ("shown", "out", "same"),
    [
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\n", False),
        ("in ...s\n", "in 4.7s\n", True),
        ("in ...s\n", "in\n4.7s\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_what_counts_as_the_same(shown: str, out: str, same: bool) -> None:
    assert matches(shown, out) is same
