"""Yields its records instead of returning a list."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    yield records.backend("yielded")
