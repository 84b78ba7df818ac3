"""A probe that never ends in time."""

from __future__ import annotations

import threading

from strata_core.hookspecs import hookimpl
from strata_dummy import records

GATE = threading.Event()


def probe(machine):
    GATE.wait(3600)
    return records.anywhere(machine)


@hookimpl
def strata_backends():
    return [records.backend("slow", probe=probe)]
