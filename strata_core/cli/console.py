"""What a command writes: text or one JSON document on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from attrs import frozen

from strata_core.cli.streams import document_written, write, write_document, write_error
from strata_core.errors import StrataError

if TYPE_CHECKING:
    from strata_core.cli.progress import TerminalProgress


@frozen
class Console:
    """Where one command writes. With `json`, stdout holds one document and nothing else.

    Used from the main thread; the progress display it makes may be told of progress by any.
    """

    json: bool = False
    quiet: bool = False

    def text(self, chunk: str) -> None:
        """Write part of a command's answer to stdout at once; nothing with `json`."""
        if not self.json:
            write(chunk)

    def line(self, text: str = "") -> None:
        """Write one line of a command's answer to stdout; nothing with `json`."""
        self.text(text + "\n")

    def document(self, body: dict[str, Any]) -> None:
        """Write the one JSON document; nothing without `json`."""
        if self.json:
            write_document(as_json(body))

    def note(self, text: str) -> None:
        """Tell the user something about the run, on stderr; nothing with `json` or `quiet`."""
        if not self.json and not self.quiet:
            write_error(text + "\n")

    def progress(self) -> TerminalProgress:
        """A display of long work; silent with `json`, `quiet`, or where nobody watches stderr."""
        from strata_core.cli.progress import TerminalProgress

        watched = not self.json and not self.quiet and sys.stderr is not None
        return TerminalProgress(shown=watched and sys.stderr.isatty())


def as_json(body: dict[str, Any]) -> str:
    """A document as text: ASCII, so that it passes any terminal and any pipe."""
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def print_error(error: StrataError, *, json_wanted: bool) -> None:
    """An error's three lines on stderr, or the document that holds it on stdout.

    After a command's document, which stays the only one, it is the three lines.
    """
    if json_wanted and not document_written():
        write_document(as_json({"error": error.as_json()}))
        return
    lines = [f"strata: {error.what}"] + [line for line in (error.why, error.remedy) if line]
    write_error("\n".join(" ".join(line.splitlines()) for line in lines) + "\n")
