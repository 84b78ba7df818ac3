"""Reading what the user wants continued: an argument, stdin, token ids, or a text file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from strata_core.errors import UsageError

LARGEST_TEXT = 64 << 20
"""Longest text read, in bytes: far beyond any context, and a bound for a mistaken file."""


def read_prompt(argument: str | None, ids: str | None) -> str | tuple[int, ...]:
    """The prompt as text, or as token ids where `--prompt-ids` gave them. Raises UsageError.

    Without an argument, or with "-", the prompt is what stdin holds, less one final line break.
    """
    if ids is not None:
        if argument is not None:
            raise UsageError(
                "PROMPT and --prompt-ids were both given",
                "a prompt is either text or token ids",
                "leave one of them out",
            )
        return parse_ids(ids)
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "PROMPT is missing",
            "there is nothing to continue",
            "give the prompt after the model, or pipe it in",
        )
    if argument is None or argument == "-":
        return without_line_break(decoded(_stdin(), "the prompt"))
    # What was not UTF-8 on the command line arrives as lone surrogates.
    return decoded(argument.encode("utf-8", "surrogateescape"), "PROMPT")


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from "5,9,3". Raises UsageError; whether the model has them is not asked here."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,9}", part, re.ASCII):
            raise UsageError(
                f"--prompt-ids: {part[:40]!r} is not a token id",
                "ids are whole numbers of 0 and more, separated by commas",
                "write them like --prompt-ids 5,9,3",
            )
    return tuple(int(part) for part in parts)


def read_text(path: str, flag: str) -> str:
    """The text of a UTF-8 file, "-" for stdin. Raises UsageError naming flag and file."""
    if path == "-":
        return decoded(_stdin(), "stdin")
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(LARGEST_TEXT + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {path!r} cannot be read",
            getattr(error, "strerror", None) or str(error),
            "give the path of a text file in UTF-8",
        ) from error
    return decoded(data, path)


def _stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError("stdin is closed", "the text was to come from it", "pipe the text in")
    return sys.stdin.buffer.read(LARGEST_TEXT + 1)


def decoded(data: bytes, name: str) -> str:
    """Bytes as text. Raises UsageError for what is too long or not UTF-8."""
    if len(data) > LARGEST_TEXT:
        raise UsageError(
            f"{name} is longer than {LARGEST_TEXT >> 20} MiB",
            "no context has room for so many tokens",
            "give a shorter text",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text",
            f"byte {error.start} (0x{data[error.start]:02x}) begins no character: {error.reason}",
            "convert the text to UTF-8",
        ) from None


def without_line_break(text: str) -> str:
    """`text` less one final line break, which `echo` and editors add."""
    if text.endswith("\r\n"):
        return text[:-2]
    return text.removesuffix("\n")
