"""Progress bars on stderr for work of more than a second: amount, rate and time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from attrs import define, field

from strata_core.cli.streams import write_error
from strata_core.cli.words import size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0
"""Work shorter than this shows nothing."""

_REDRAW_S = 0.1


@define
class _Piece:
    label: str
    total: int
    unit: str
    started: float
    moved: int = 0
    drawn: float = 0.0
    task: TaskID | None = None


@define(eq=False)
class TerminalProgress:
    """Implements `interfaces.Progress`. Any thread may call it; it never raises into the work.

    Pieces of work may nest: `advance` and `done` mean the one that began last. Nothing is drawn,
    and rich not imported, unless `shown` and a piece lasts longer than a second. The display is
    gone from the terminal when no piece is left.
    """

    shown: bool
    _pieces: list[_Piece] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)
    _display: Progress | None = None

    def start(self, label: str, nbytes: int) -> None:
        """A piece of work begins that will move `nbytes` in all."""
        self.begin(label, nbytes, "bytes")

    def begin(self, label: str, total: int, unit: str) -> None:
        """As `start`, for work that is counted in something else, e.g. tokens."""
        with self._lock:
            self._pieces.append(_Piece(label, total, unit, time.monotonic()))

    def advance(self, nbytes: int) -> None:
        """`nbytes` more were moved."""
        with self._lock:
            if not self._pieces:
                return
            piece = self._pieces[-1]
            piece.moved += nbytes
            now = time.monotonic()
            late = now - piece.started >= PATIENCE_S and now - piece.drawn >= _REDRAW_S
            if self.shown and late:
                piece.drawn = now
                self._draw(piece)

    def reach(self, moved: int, total: int) -> None:
        """Say how far the piece that began last is, and how far it goes, where that comes late."""
        with self._lock:
            if self._pieces:
                self._pieces[-1].total = total
        self.advance(moved - self.moved)

    @property
    def moved(self) -> int:
        """How much of the piece of work that began last has been moved; 0 without one."""
        with self._lock:
            return self._pieces[-1].moved if self._pieces else 0

    def done(self) -> None:
        """The piece of work that began last has ended."""
        with self._lock:
            piece = self._pieces.pop() if self._pieces else None
            if self._display is None:
                return
            if piece is not None and piece.task is not None:
                self._display.remove_task(piece.task)
            if not self._pieces:
                self._stop()

    def tell(self, text: str) -> None:
        """Write a line to stderr, above the display where there is one."""
        with self._lock:
            if self._display is None:
                write_error(text + "\n")
            else:
                self._display.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the display off the terminal, whatever is still going on."""
        with self._lock:
            self._pieces.clear()
            self._stop()

    def _stop(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _draw(self, piece: _Piece) -> None:
        if self._display is None:
            self._display = _display()
            self._display.start()
        if piece.task is None:
            piece.task = self._display.add_task(piece.label, amount="")
        self._display.update(
            piece.task,
            total=piece.total or None,
            completed=piece.moved,
            amount=_amount(piece, piece.drawn - piece.started),
        )


def _amount(piece: _Piece, seconds: float) -> str:
    """How much of how much, at what rate, and how long it will still take."""
    rate = piece.moved / seconds
    if piece.unit == "bytes":
        text = f"{size(piece.moved)} of {size(piece.total)}, {size(rate)}/s"
    else:
        digits = 0 if rate >= 10 else 1
        text = f"{piece.moved} of {piece.total} {piece.unit}, {rate:.{digits}f}/s"
    if rate > 0:
        left = round(max(0, piece.total - piece.moved) / rate)
        text += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    return text


def _display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        console=Console(file=sys.stderr),
        transient=True,
    )
