"""Probes that raise, exit, or return something else."""

from __future__ import annotations

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import Unusable
from strata_dummy import records


def exits(machine):
    raise SystemExit(4)


def raises(machine):
    raise ValueError("no such fact")


@hookimpl
def strata_backends():
    return [
        records.backend("raising", probe=raises),
        records.backend("exiting", probe=exits),
        records.backend("wordy", probe=lambda machine: "yes"),
        records.backend("mute", probe=lambda machine: Unusable("")),
    ]
