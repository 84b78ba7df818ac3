"""Progress bars on stderr for work of more than a second: amount, rate and time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from attrs import define, field

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

    def reach(self, label: str, moved: int, total: int, unit: str) -> None:
        """Begin a piece of work unless one is going on, and say how far it is."""
        with self._lock:
            idle = not self._pieces
        if idle:
            self.begin(label, total, unit)
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
            piece.task = self._display.add_task(
                piece.label, total=piece.total or None, amount="", rate=""
            )
        rate = piece.moved / max(piece.drawn - piece.started, 1e-9)
        self._display.update(
            piece.task,
            completed=piece.moved,
            amount=f"{_amount(piece.moved, piece.unit)} of {_amount(piece.total, piece.unit)}",
            rate=f"{_amount(rate, piece.unit)}/s",
        )


def _amount(number: float, unit: str) -> str:
    if unit != "bytes":
        return f"{number:.0f} {unit}"
    for name in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {name}"
        number /= 1024
    return f"{number:.2f} GiB"


def _display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
