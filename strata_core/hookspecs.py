"""The three hooks, each called once at start; each returns a LIST of frozen records.

Implement them in a module that an entry point of the group `strata` names, marked with
`strata_core.hookspecs.hookimpl`. The module must import light: no GPU library at import.
"""

from __future__ import annotations

import pluggy

from strata_core.interfaces import AllocatorRecord, BackendRecord, SourceRecord

PROJECT = "strata"
"""Name of the pluggy project, of the hook prefix and of the entry-point group."""

_spec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@_spec
def strata_backends() -> list[BackendRecord]:
    """Backends this plugin offers: a runtime, a table of kernels, and what they can do."""
    raise AssertionError("a hook specification is never called")


@_spec
def strata_allocators() -> list[AllocatorRecord]:
    """Allocators of host memory this plugin offers, each naming the backends it serves."""
    raise AssertionError("a hook specification is never called")


@_spec
def strata_expert_sources() -> list[SourceRecord]:
    """Expert sources this plugin offers."""
    raise AssertionError("a hook specification is never called")
