"""A list of records of another role."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    return [records.source("a-source")]
