"""Strata's log on stderr: which lines are shown, and that logging is as it was afterwards."""

from __future__ import annotations

import logging

import pytest

from strata_core.cli.logs import LOGGER, shown_log
from strata_core.cli.progress import TerminalProgress


def told(*, quiet: bool) -> list[str]:
    lines: list[str] = []
    with shown_log(lines.append, quiet=quiet):
        logging.getLogger(f"{LOGGER}.part").debug("too much")
        logging.getLogger(f"{LOGGER}.part").info("context %s ready", 1)
        logging.getLogger(f"{LOGGER}.part").warning("only 3 MiB")
        logging.getLogger("another").warning("somebody else's")
    return lines


def test_informative_lines_and_warnings_are_shown() -> None:
    assert told(quiet=False) == ["context 1 ready", "only 3 MiB"]


def test_quiet_leaves_warnings() -> None:
    assert told(quiet=True) == ["only 3 MiB"]


def test_logging_is_as_before() -> None:
    logger = logging.getLogger(LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))
    with pytest.raises(ZeroDivisionError), shown_log(print, quiet=False):
        raise ZeroDivisionError
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_record_that_cannot_be_formatted_stops_nothing(monkeypatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    lines: list[str] = []
    with shown_log(lines.append, quiet=False):
        logging.getLogger(LOGGER).info("%d", "no number")
        logging.getLogger(LOGGER).info("after it")
    assert lines == ["after it"]


def test_lines_go_to_stderr_with_and_without_a_display(capsys, monkeypatch) -> None:
    progress = TerminalProgress(shown=True)
    progress.tell("before")
    monkeypatch.setattr("strata_core.cli.progress.PATIENCE_S", 0.0)
    progress.start("[work]", 10)
    progress.advance(5)
    progress.tell("[meanwhile]")
    progress.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "before\n" in shown.err
    assert "[meanwhile]" in shown.err
