"""A hook whose name has a typing error."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backend():
    return [records.backend("mistyped")]
