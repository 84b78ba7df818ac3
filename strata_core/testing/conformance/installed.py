"""Suites for records that are installed, found by name instead of supplied by a test module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import Backend, BackendContext, Role
from strata_core.kernels.device.backend import DeviceBackend
from strata_core.kernels.device.table import make_launch
from strata_core.machine import read_machine
from strata_core.plugins import Catalogue, load_plugins
from strata_core.runtime import Launch, Runtime
from strata_core.testing.conformance.allocator import AllocatorSuite
from strata_core.testing.conformance.backend import BackendSuite
from strata_core.testing.conformance.runtime import RuntimeSuite
from strata_core.testing.conformance.source import SourceSuite

SUITES: dict[Role, type] = {
    "backend": BackendSuite,
    "allocator": AllocatorSuite,
    "source": SourceSuite,
}
"""The suite of each role."""


def suites(
    role: Role,
    name: str,
    model: str | None = None,
    plain: str | None = None,
    blocked: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> list[type]:
    """Subclasses of the role's suites that build the installed record `name`.

    `model` is the path of a model to test with, `plain` one with the same experts that can be read
    without the source, `blocked` are plugins not to load, `options` settings to build with. A
    backend with devices of its own has its runtime tested as well.
    """
    found = load_plugins(blocked=blocked)
    (offer,) = [o for o in found.offers(role) if o.name == name]
    record: Any = offer.record
    given = dict(options or {})

    methods: dict[str, Any] = {
        "make": lambda _self, context: record.build(context),
        "options": lambda _self: given,
    }
    if model is not None:
        methods["checkpoint"] = lambda _self, _folder: open_checkpoint(Path(model))
    if plain is not None:
        same = open_checkpoint(Path(plain))
        methods["raw"] = lambda self, _checkpoint, expert: SourceSuite.raw(self, same, expert)
    if role == "allocator":
        methods["backend"] = lambda _self: _backend_for(found, record.serves, given)
        # What a trial finds out, over a stand-in perhaps, must not be remembered of this machine.
        methods["options"] = lambda _self: {"cache_dir": Path.cwd() / "cache", **given}
    made = [type("Installed", (SUITES[role],), methods)]
    if role == "backend" and record.devices is not None:
        more = {"build": lambda _self: record.build(_context(given))}
        made.append(type("InstalledRuntime", (_RuntimeOfBackend,), more))
    return made


class _RuntimeOfBackend(RuntimeSuite):
    """The suite for runtimes, on the runtime of a backend that is built anew for each test."""

    def build(self) -> Backend:
        """The backend whose runtime is tested."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def built(self) -> Iterator[list[Any]]:
        """The backends that a test had built; closed after it."""
        self._built: list[Any] = []
        yield self._built
        for backend in self._built:
            backend.close()

    def make(self) -> Runtime:
        """The runtime of a new backend."""
        backend: Any = self.build()
        self._built.append(backend)
        if not isinstance(getattr(backend, "runtime", None), Runtime):
            pytest.skip("the backend shows no `runtime`")
        runtime: Runtime = backend.runtime
        return runtime

    def add(self, x: int, y: int, count: int) -> Launch | None:
        """Core's kernel of that name, where the backend runs core's kernels."""
        if not isinstance(self._built[-1], DeviceBackend):
            return None
        return make_launch("add", x=x, y=y, rows=1, width=count)


def _context(options: Mapping[str, object]) -> BackendContext:
    from strata_core.config import resolve_arguments

    return BackendContext(
        machine=read_machine(),
        options={**resolve_arguments({}, {}).options(), **options},
        degrade=lambda _item: None,
    )


def _backend_for(
    found: Catalogue, serves: tuple[str, ...], options: Mapping[str, object]
) -> Backend:
    """The backend that settings name, as a stand-in too, else the first that is served."""
    names = {offer.name for offer in found.backends}
    asked = options.get("backend", "auto")
    wanted = [asked] if asked != "auto" else [name for name in serves if name in names]
    if not wanted:
        raise LookupError(f"none of the backends {', '.join(serves)} is installed")
    return found.backend(str(wanted[0])).record.build(_context(options))
