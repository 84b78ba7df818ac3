"""Forgets to mark its hook."""

from __future__ import annotations

from strata_dummy import records


def strata_backends():
    return [records.backend("unmarked")]
