"""Written for the next major interface version."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    return [records.backend("from-the-future", api=(2, 0))]
