"""A hook that wants an argument which no hook has."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends(machine):
    return [records.backend("argued")]
