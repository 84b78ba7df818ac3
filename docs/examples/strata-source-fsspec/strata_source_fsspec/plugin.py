"""The record that this distribution offers; imports nothing heavy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    Probe,
    Source,
    SourceContext,
    SourceRecord,
    Unusable,
    Usable,
)

if TYPE_CHECKING:
    from strata_core.machine import Machine

API = (1, 0)
"""The interface version that this distribution is written for."""

FORM = "fsspec"
"""The form of the packs that it reads."""


def probe(machine: Machine) -> Probe:
    """Whether the library is there."""
    if machine.observe("module:fsspec", lambda: find_spec("fsspec") is not None):
        return Usable("fsspec")
    return Unusable("the package fsspec is not installed", "pip install fsspec")


def build(context: SourceContext) -> Source:
    """The source of the record."""
    from strata_source_fsspec.source import build

    return build(context)


@hookimpl
def strata_expert_sources() -> list[SourceRecord]:
    """The source for packs whose experts are elsewhere."""
    return [
        SourceRecord(
            name=FORM,
            summary="Experts of a pack read over the network or from an archive",
            api=API,
            probe=probe,
            build=build,
            claims=lambda form: form == FORM,
        )
    ]
