"""Suites for records that are installed, found by name instead of supplied by a test module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import Backend, BackendContext, Role
from strata_core.machine import read_machine
from strata_core.plugins import Catalogue, load_plugins
from strata_core.testing.conformance.allocator import AllocatorSuite
from strata_core.testing.conformance.backend import BackendSuite
from strata_core.testing.conformance.source import SourceSuite

SUITES: dict[Role, type] = {
    "backend": BackendSuite,
    "allocator": AllocatorSuite,
    "source": SourceSuite,
}
"""The suite of each role."""


def suite(
    role: Role, name: str, model: str | None = None, plain: str | None = None, **options: object
) -> type:
    """A subclass of the role's suite that builds the installed record `name`.

    `model` is the path of a model to test with, `plain` one with the same experts that can be read
    without the source, `options` are settings to build with.
    """
    found = load_plugins()
    (offer,) = [o for o in found.offers(role) if o.name == name]
    record: Any = offer.record

    methods: dict[str, Any] = {
        "make": lambda _self, context: record.build(context),
        "options": lambda _self: dict(options),
    }
    if model is not None:
        methods["checkpoint"] = lambda _self, _folder: open_checkpoint(Path(model))
    if plain is not None:
        same = open_checkpoint(Path(plain))
        methods["raw"] = lambda self, _checkpoint, expert: SourceSuite.raw(self, same, expert)
    if role == "allocator":
        methods["backend"] = lambda _self: _backend_for(found, record.serves, options)
    return type("Installed", (SUITES[role],), methods)


def _backend_for(found: Catalogue, serves: tuple[str, ...], options: dict[str, Any]) -> Backend:
    from strata_core.config import resolve_arguments

    names = {offer.name for offer in found.backends}
    wanted = [name for name in serves if name in names]
    if not wanted:
        raise LookupError(f"none of the backends {', '.join(serves)} is installed")
    context = BackendContext(
        machine=read_machine(),
        options={**resolve_arguments({}, {}).options(), **options},
        degrade=lambda _item: None,
    )
    return found.backend(wanted[0]).record.build(context)
