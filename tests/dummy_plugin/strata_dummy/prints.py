"""Writes to stdout at every opportunity."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_dummy import records

print("printed at import")


def probe(machine):
    print("printed by the probe")
    return records.anywhere(machine)


@hookimpl
def strata_backends():
    print("printed by the hook")
    return [records.backend("talkative", probe=probe)]
