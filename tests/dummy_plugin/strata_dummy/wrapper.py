"""A hook that wraps those of other plugins."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl(wrapper=True)
def strata_backends():
    return (yield) + [records.backend("wrapped")]
