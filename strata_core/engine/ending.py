"""Closing behind an error: what fails then goes to the log, and never takes the error's place.

A device that is lost fails every call that gives something back, too; what lost it is what the user
has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from strata_core.errors import StrataError

_log = logging.getLogger("strata.start")

Leave = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""What `ExitStack.push` takes."""


def closing(close: Callable[[], object]) -> Leave:
    """An exit that closes; a StrataError of it is raised only where no other is on its way."""

    def leave(
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            close()
        except StrataError as failed:
            if error is None:
                raise
            _log.warning("closing failed as well: %s (%s)", failed.what, failed.why)

    return leave
