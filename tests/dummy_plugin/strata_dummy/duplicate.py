"""Offers a name that the sound plugin offers as well, and one of its own."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    return [records.backend("dummy"), records.backend("own")]
