"""Forgets to return."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    records.backend("forgotten")
