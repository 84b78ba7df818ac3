"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from strata_core.errors import UsageError

MAX_STOP = 1 << 16
"""Most characters of one stop string."""


class TextStream:
    """Turns token ids, pushed one by one, into text that may be shown at once.

    Bytes of an unfinished character are held back until it is complete; bytes that can never become
    one give U+FFFD. Text that may be the beginning of a stop string is held back too. Where several
    stop strings match, the one that is complete first ends the text, the longer one of two that end
    together, so the result does not depend on how tokens cut the text. Used by one thread.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        for text in stop:
            if not isinstance(text, str):
                raise UsageError(
                    "a stop string cannot be used",
                    f"it is a {type(text).__name__}, not text",
                    "give the text to stop before",
                )
            if not text or len(text) > MAX_STOP:
                raise UsageError(
                    "a stop string cannot be used",
                    f"it has {len(text)} characters; 1 to {MAX_STOP} are possible",
                    "leave it out or shorten it",
                )
        self._token_bytes = token_bytes
        self._stops = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether a stop string was seen; nothing is shown afterwards."""
        return self._finished

    def push(self, token: int) -> str:
        """Take the next token; returns the text that can be shown now, often empty."""
        if self._finished:
            return ""
        return self._take(self._decoder.decode(self._token_bytes(token)))

    def flush(self) -> str:
        """The end of the tokens: what was held back, an unfinished character as U+FFFD."""
        if self.finished:
            return ""
        shown = self._take(self._decoder.decode(b"", final=True))
        if not self.finished:
            shown += self._held
            self._held = ""
        return shown

    def _take(self, text: str) -> str:
        if not self._stops:
            return text  # nothing is ever held back
        if not text:
            return ""
        before = len(self._held)
        self._held += text
        start = self._first_stop(before)
        if start is not None:
            self._finished = True
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _first_stop(self, before: int) -> int | None:
        """Where the stop string begins that ends first; none was in the text held `before`."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _possible_start(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
