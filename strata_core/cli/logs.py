"""The log of a command on stderr: what parts of Strata tell about a start, line by line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = "strata"
"""The logger above all of Strata's own."""


class _Lines(logging.Handler):
    """Hands each record's text on as a line."""

    def __init__(self, tell: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one record; one that cannot be formatted is logging's own to report."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - as logging's handlers do: a log line never stops work
            self.handleError(record)
            return
        self._tell(text)


@contextmanager
def shown_log(tell: Callable[[str], None], *, quiet: bool) -> Iterator[None]:
    """While this runs, Strata's log goes to `tell`, a line a record; warnings alone with `quiet`.

    The logger's own level and its other handlers are as before afterwards.
    """
    logger = logging.getLogger(LOGGER)
    level = logging.WARNING if quiet else logging.INFO
    handler = _Lines(tell, level)
    before, passed_on = logger.level, logger.propagate
    logger.setLevel(min(level, before) if before else level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = passed_on
