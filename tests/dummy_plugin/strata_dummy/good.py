"""Sound in all three roles."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records


@hookimpl
def strata_backends():
    return [records.backend("dummy")]


@hookimpl
def strata_allocators():
    return [records.allocator("dummy-memory", ("dummy",))]


@hookimpl
def strata_expert_sources():
    return [records.source("dummy-source", claims=lambda form: form == "dummy-form")]
