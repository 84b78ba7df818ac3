"""Where a prompt comes from, and what is refused."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.cli import prompt as module
from strata_core.cli.prompt import decoded, parse_ids, read_prompt, read_text, without_line_break
from strata_core.errors import UsageError


class Stdin:
    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("argument", "data", "expected"),
    [
        ("In the beginning", b"unread", "In the beginning"),
        ("-", b"from stdin\n", "from stdin"),
        (None, b"from stdin\r\n", "from stdin"),
        (None, b"two\n\n", "two\n"),
        (None, "gr\u00fcn".encode(), "gr\u00fcn"),
        (None, b"", ""),
    ],
)
def test_prompt(argument, data, expected, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert read_prompt(argument, None) == expected


def test_no_prompt_at_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", terminal=True))
    with pytest.raises(UsageError, match="PROMPT is missing"):
        read_prompt(None, None)
    assert read_prompt(None, "5,9,3") == (5, 9, 3)


def test_argument_that_was_not_utf8() -> None:
    argument = b"ab\xffc".decode("utf-8", "surrogateescape")
    with pytest.raises(UsageError, match=r"byte 2 \(0xff\)"):
        read_prompt(argument, None)


def test_stdin_that_is_not_utf8(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"\xc3"))
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt("-", None)


def test_reading_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGEST_TEXT", 1 << 20)
    stdin = Stdin(b"x" * (3 << 20))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UsageError, match="longer than 1 MiB"):
        read_prompt(None, None)
    assert stdin.buffer.tell() == (1 << 20) + 1


def test_text_file(tmp_path) -> None:
    (tmp_path / "t.txt").write_bytes(b"line\n")
    assert read_text(str(tmp_path / "t.txt"), "--text") == "line\n"
    (tmp_path / "bad.txt").write_bytes(b"a\x80")
    with pytest.raises(UsageError, match=r"bad\.txt is not UTF-8"):
        read_text(str(tmp_path / "bad.txt"), "--text")
    with pytest.raises(UsageError, match="--text"):
        read_text("a\0b", "--text")


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1))
def test_ids_are_read_back(ids: list[int]) -> None:
    assert parse_ids(", ".join(map(str, ids))) == tuple(ids)


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "a", "-1", "1.0", "1 2", "0x3", "9" * 10, "\u0663"]
)
def test_wrong_ids(text: str) -> None:
    with pytest.raises(UsageError, match="not a token id"):
        parse_ids(text)


@given(st.text())
def test_decoding_is_the_inverse(text: str) -> None:
    assert decoded(text.encode(), "x") == text
    assert without_line_break(text + "\n") == (text[:-1] if text.endswith("\r") else text)
