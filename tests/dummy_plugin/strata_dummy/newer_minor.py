"""Written for a later minor interface version."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    return [records.backend("from-next-year", api=(1, 99))]
