"""Progress: silent for short work and where nobody watches, told by any thread."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable

import pytest

from strata_core.cli import progress as module
from strata_core.cli.console import Console
from strata_core.cli.progress import TerminalProgress
from strata_core.interfaces import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def watched(monkeypatch) -> Callable[[], Terminal]:
    """Called in the test itself: pytest sets sys.stderr anew between set-up and test."""

    def watch() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        return found

    return watch


def test_is_the_protocol() -> None:
    progress: Progress = TerminalProgress(shown=False)
    assert progress is not None


def test_short_work_shows_nothing(clock, watched) -> None:
    terminal = watched()
    progress = TerminalProgress(shown=True)
    progress.start("experts", 100)
    clock[0] += 0.9
    progress.advance(100)
    progress.done()
    assert terminal.getvalue() == ""


def test_long_work_shows_amount_rate_and_label(clock, watched) -> None:
    terminal = watched()
    progress = TerminalProgress(shown=True)
    progress.start("experts", 4 << 20)
    clock[0] += 2.0
    progress.advance(1 << 20)
    progress.close()
    shown = terminal.getvalue()
    assert "experts" in shown
    assert "1.00 MiB of 4.00 MiB, 512.00 KiB/s, 0:00:06 left" in shown


def test_other_units(clock, watched) -> None:
    terminal = watched()
    progress = TerminalProgress(shown=True)
    progress.begin("prompt", 0, "tokens")
    clock[0] += 2.0
    progress.reach(60, 100)
    progress.close()
    assert "60 of 100 tokens, 30/s, 0:00:01 left" in terminal.getvalue()


def test_pieces_nest_and_the_display_goes_away(clock, watched) -> None:
    terminal = watched()
    progress = TerminalProgress(shown=True)
    progress.start("all", 10)
    progress.start("part", 5)
    clock[0] += 2.0
    progress.advance(5)
    progress.done()
    progress.advance(5)
    progress.done()
    assert "part" in terminal.getvalue()
    assert not [t for t in threading.enumerate() if "refresh" in t.name.lower()]
    progress.done()
    progress.advance(1)


@pytest.mark.parametrize(
    "console", [Console(json=True), Console(quiet=True)], ids=["json", "quiet"]
)
def test_silent_when_asked(console, clock, watched) -> None:
    terminal = watched()
    progress = console.progress()
    progress.start("experts", 10)
    clock[0] += 5
    progress.advance(10)
    progress.done()
    assert terminal.getvalue() == ""


def test_silent_without_a_terminal(clock, monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Console().progress()
    progress.start("experts", 10)
    clock[0] += 5
    progress.advance(10)
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Console().progress().shown


def test_threads_lose_nothing(watched) -> None:
    watched()
    progress = TerminalProgress(shown=True)
    progress.start("experts", 8000)

    def work() -> None:
        for _ in range(1000):
            progress.advance(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.moved == 8000
    progress.done()
    assert progress.moved == 0
