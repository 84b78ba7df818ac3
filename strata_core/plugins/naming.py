"""Naming the plugins at work when something failed that nobody foresaw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from strata_core.errors import PluginError, StrataError
from strata_core.interfaces import Role
from strata_core.plugins.guard import describe

CORE = "strata-core"
"""The distribution whose own failures are told as they are."""


class Part(Protocol):
    """What was chosen for a role, and the distribution it comes from; a `Selection` is one."""

    @property
    def role(self) -> Role:
        """The role it fills."""

    @property
    def name(self) -> str:
        """The record's name."""

    @property
    def distribution(self) -> str:
        """The distribution that offers it."""

    @property
    def version(self) -> str:
        """That distribution's version."""


def plugins_among(parts: Iterable[Part]) -> str:
    """Those that are not core's own, as messages name them; "" where there are none."""
    return " and ".join(
        f"{part.role} {part.name} of {part.distribution} {part.version}"
        for part in parts
        if part.distribution != CORE
    )


@contextlib.contextmanager
def naming(
    what: str, parts: Iterable[Part], kind: type[StrataError] = PluginError
) -> Iterator[None]:
    """An error that nobody foresaw becomes one that names the plugins among `parts`.

    `what` is its first line. StrataError, Ctrl-C and a lack of memory pass, and so does everything
    where all parts are core's own.
    """
    try:
        yield
    except (StrataError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        others = plugins_among(parts)
        if not others:
            raise
        raise kind(what, f"{describe(error)}; at work was {others}", remedy(others)) from error


def remedy(others: str) -> str:
    """The last line of such an error."""
    return f"do without {others}, or run again with --debug and tell its authors"
