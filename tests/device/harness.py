"""Backends for checks on a device: the real record of a backend, over a runtime that is changed.

A `Lens` passes every verb on to the runtime that is really there and changes what its subclass
says: one physical device listed several times, memory that ends early, a driver that pins little.
`installed` has `strata_core` find the backend so, also where its distribution is not installed. For
tests; nothing of it ships.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import evolve

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "plugins" / name) for name in ("cuda", "hip", "wsl"))]

from strata_core.errors import Refused  # noqa: E402
from strata_core.interfaces import (  # noqa: E402
    AllocatorRecord,
    BackendContext,
    BackendRecord,
    Usable,
)
from strata_core.kernels.device import backend as backends  # noqa: E402
from strata_core.plugins import Catalogue, Offer, load_plugins  # noqa: E402
from strata_core.runtime import Device, DeviceMemory, Runtime  # noqa: E402
from strata_core.testing.sim import VERBS  # noqa: E402

PASSED_ON = (*(verb for verb in VERBS if verb != "graph_launcher"), "devices")
MIB = 1 << 20


class Lens:
    """A runtime over another one. Its threads and errors are those of the one it is over."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def label(self) -> str:
        """The devices' label."""
        return str(self.inner.label)

    @property
    def graph_launcher(self) -> int:
        """The driver's own function."""
        return int(self.inner.graph_launcher)


def _passing(verb: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.inner, verb)(*args)


for _verb in PASSED_ON:
    setattr(Lens, _verb, _passing(_verb))


class Repeated(Lens):
    """Each physical device `times` over: logical device i is physical device i // times.

    Logical devices of one physical device share its memory: caches on them need a size.
    """

    times = 2

    def devices(self) -> Sequence[Device]:
        """The logical devices."""
        return repeated(self.inner.devices(), self.times)


def repeated(devices: Sequence[Device], times: int) -> tuple[Device, ...]:
    """Every device so often, numbered anew."""
    label = devices[0].label.rstrip("0123456789") if devices else ""
    return tuple(
        evolve(devices[n // times], index=n, label=f"{label}{n}")
        for n in range(len(devices) * times)
    )


def _translated(verb: str, place: int) -> Callable[..., Any]:
    def call(self: Repeated, *args: Any) -> Any:
        given = list(args)
        given[place] //= self.times
        return getattr(self.inner, verb)(*given)

    return call


OF_A_DEVICE = {
    "open_context": 0, "memory": 0, "alloc": 0, "free": 0, "alias": 1, "create_stream": 0,
    "create_event": 0, "load": 0,
}  # fmt: skip
"""Verbs that are given a device, and as which argument."""

for _verb, _place in OF_A_DEVICE.items():
    setattr(Repeated, _verb, _translated(_verb, _place))


class Bounded(Lens):
    """Devices that have no more than `most` bytes to give (None: all they have).

    `peaks` is what was held with each allocation, in order.
    """

    def __init__(self, inner: Any, most: int | None = None) -> None:
        super().__init__(inner)
        self.most, self.peaks = most, list[int]()
        self._held: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Bytes that were not given back."""
        return sum(self._held.values())

    def alloc(self, device: int, nbytes: int) -> int:
        """Device memory, as long as there is some."""
        if self.most is not None and self.held + nbytes > self.most:
            raise Refused(
                f"allocate {nbytes} bytes on {self.label}{device} failed",
                f"out of memory: a test lets {self.most} bytes be had",
                "free memory",
            )
        address = int(self.inner.alloc(device, nbytes))
        self._held[address] = nbytes
        self.peaks.append(self.held)
        return address

    def free(self, device: int, address: int) -> None:
        """Give it back."""
        self.inner.free(device, address)
        del self._held[address]

    def memory(self, device: int) -> DeviceMemory:
        """What is free, within the bound."""
        found: DeviceMemory = self.inner.memory(device)
        if self.most is None:
            return found
        return evolve(found, free=min(found.free, max(0, self.most - self.held)))


class PinsLittle(Lens):
    """A driver that page-locks `budget` bytes in all, of which each context takes `context`."""

    def __init__(self, inner: Any, budget: int = 1 << 30, context: int = 64 * MIB) -> None:
        super().__init__(inner)
        self._budget, self._left, self._context = budget, budget, context
        self._held: dict[int, int] = {}
        self._opened: set[int] = set()

    @property
    def taken(self) -> int:
        """Bytes of the budget that are in use."""
        return self._budget - self._left

    def open_context(self, device: int) -> None:
        """Open it, out of the budget."""
        self.inner.open_context(device)
        if device not in self._opened:
            self._opened.add(device)
            self._left -= self._context

    def host_alloc(self, nbytes: int) -> int:
        """Page-locked memory, within the budget."""
        self._check(nbytes)
        address = int(self.inner.host_alloc(nbytes))
        self._take(address, nbytes)
        return address

    def host_free(self, address: int) -> None:
        """Give it back."""
        self.inner.host_free(address)
        self._left += self._held.pop(address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory, within the budget."""
        self._check(nbytes)
        self.inner.register(address, nbytes)
        self._take(address, nbytes)

    def unregister(self, address: int) -> None:
        """Undo it."""
        self.inner.unregister(address)
        self._left += self._held.pop(address)

    def _take(self, address: int, nbytes: int) -> None:
        self._held[address] = nbytes
        self._left -= nbytes

    def _check(self, nbytes: int) -> None:
        if nbytes > self._left:
            raise Refused(
                f"page-lock {nbytes} bytes failed",
                f"out of memory: a test lets {max(self._left, 0)} more bytes be page-locked",
                "pin less",
            )


def record_of(name: str, catalogue: Catalogue) -> Offer[BackendRecord]:
    """A backend's record, from its plugin where that is not installed."""
    for offer in catalogue.backends:
        if offer.name == name:
            return offer
    plugin = importlib.import_module(f"strata_{name}.plugin")
    return Offer(plugin.strata_backends()[0], f"strata-{name}", "0")


def _allocators(name: str, catalogue: Catalogue) -> tuple[Offer[AllocatorRecord], ...]:
    """The allocators, with those of a plugin that is not installed."""
    if name == "sim" or any(name in offer.record.serves for offer in catalogue.allocators):
        return tuple(catalogue.allocators)
    plugin = importlib.import_module(f"strata_{name}.plugin")
    more = (Offer(record, f"strata-{name}", "0") for record in plugin.strata_allocators())
    return (*catalogue.allocators, *more)


def wsl_offer(backend: str, catalogue: Catalogue) -> Offer[AllocatorRecord]:
    """strata-wsl's record, made to serve a backend in the place of its usual allocator."""
    from strata_wsl.plugin import strata_allocators

    (record,) = strata_allocators()
    usual = [
        offer.name for offer in _allocators(backend, catalogue) if backend in offer.record.serves
    ]
    usual = [name for name in usual if name != record.name]
    made = evolve(
        record, serves=(backend,), supersedes=tuple(usual), probe=lambda _machine: Usable()
    )
    return Offer(made, "strata-wsl", "0")


def own_order_of(models: Iterable[Sequence[Collection[str]]], first: str) -> str:
    """What prompts in an order of the backend's own were compared with; "" where there are none.

    For each model, for each of its runs the names of such prompts; `first` is what the first run of
    a model is called.
    """
    runs = [[own for own in model if own] for model in models]
    names = sorted({name for model in runs for own in model for name in own})
    if not names:
        return ""
    alone = any(len(model) == 1 for model in runs)
    which = f"that of {first}" if not alone else f"that of {first}, WHICH RAN ALONE"
    return f" (prompt {', '.join(names)}, in an order of its own: {which})"


@contextmanager
def installed(
    name: str,
    wrap: Callable[[Runtime], Any] = lambda runtime: runtime,
    *,
    times: int = 1,
    wsl: bool = False,
) -> Iterator[list[Any]]:
    """While this runs, backend `name` is over what `wrap` makes of its runtime.

    `times`: its devices are listed so often, as `Repeated` does. `wsl`: with strata-wsl's order of
    a start. Gives the backends that were built, in order.
    """
    made: list[Any] = []
    real, loaded = backends.DeviceBackend, load_plugins

    class Changed(real):
        def __init__(self, runtime: Any, context: BackendContext, **more: Any) -> None:
            super().__init__(wrap(runtime), context, **more)
            made.append(self)

    def catalogue(blocked: Sequence[str] = ()) -> Catalogue:
        found = loaded(blocked=blocked)
        offer = record_of(name, found)
        listed = offer.record.devices

        def devices(machine: Any, options: Mapping[str, Any]) -> tuple[Device, ...]:
            assert listed is not None, f"{name} has devices"
            return repeated(tuple(listed(machine, options)), times)

        offer = evolve(offer, record=evolve(offer.record, devices=devices))
        others = tuple(one for one in found.backends if one.name != name)
        allocators = _allocators(name, found)
        if wsl:
            allocators = tuple(one for one in allocators if one.name != "wsl")
            allocators = (*allocators, wsl_offer(name, found))
        return evolve(found, backends=(*others, offer), allocators=allocators)

    with (
        mock.patch.object(backends, "DeviceBackend", Changed),
        mock.patch("strata_core.engine.prepare.load_plugins", catalogue),
        mock.patch("strata_core.verify.identity.load_plugins", catalogue),
    ):
        yield made
