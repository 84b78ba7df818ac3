"""Host memory under WSL 2: contexts first, small buffers next, and no more pinned than is granted.

The driver there pins and maps about 1 GiB of host memory in total, whatever is free, and contexts
take from it too. Who comes later gets a plain "out of memory". So the start policy puts what cannot
be done without first, and how much is left is found out before anything bulky asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from attrs import evolve

from strata_core.errors import PluginError
from strata_core.interfaces import Allocator, AllocatorContext, Region, StartPolicy
from strata_core.machine import Machine
from strata_core.memory import pinned
from strata_core.memory.preparing import Prepared, prepare
from strata_core.memory.probe_pins import PinKey, pin_limit
from strata_core.runtime import Runtime

POLICY = StartPolicy(contexts_first=True, small_pins_first=True, embedding="pinned")
"""What WSL needs of a start. The limit joins it once it is known."""

STEP = 8 << 20
"""Bytes by which the probe asks for more: as much may be left unused of the little there is."""


class WslAllocator:
    """Core's allocator of page-locked memory with a limit that is probed. Any thread may call it.

    The limit is what STRATA_PIN_LIMIT_GIB gives, else what was found out on this machine before,
    else what the driver grants now: asked for once the contexts are open, and freed again.
    """

    def __init__(self, context: AllocatorContext, runtime: Runtime, step: int = STEP) -> None:
        self._context, self._runtime, self._step = context, runtime, step
        self._given: Allocator | None = None
        self._open: tuple[int, ...] | None = None
        self._lock = Lock()

    @property
    def start_policy(self) -> StartPolicy:
        """Contexts first, then small buffers; the limit is there once the contexts are ready."""
        return POLICY if self._given is None else self._given.start_policy

    def contexts_ready(self, devices: Sequence[int]) -> None:
        """Find out what may be pinned. Raises DeviceError where the driver keeps what it gave."""
        self._open = tuple(devices)
        self._allocator()

    def prepare(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Prepared:
        """Host memory that may be filled while the rest is made ready. Raises StrataError."""
        return prepare(self._allocator(), nbytes, cuts, purpose)

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        """Host memory by the chain pinned, sliced, locked. Raises StrataError."""
        return self._allocator().reserve(nbytes, cuts, purpose)

    def regions(self) -> tuple[Region, ...]:
        """What is held now, each region once all of its spans are settled."""
        given = self._given
        return given.regions() if isinstance(given, pinned.PinnedAllocator) else ()

    def release(self, region: Region) -> None:
        """Give a region back."""
        self._allocator().release(region)

    def close(self) -> None:
        """Release whatever is left."""
        if self._given is not None:
            self._given.close()

    def _allocator(self) -> Allocator:
        with self._lock:
            if self._given is None:
                limit = self._limit()
                self._given = pinned.build(self._context, evolve(POLICY, pin_limit=limit))
            return self._given

    def _limit(self) -> int | None:
        context, runtime = self._context, self._runtime
        used = getattr(context.backend, "devices", None)
        key = PinKey.of(runtime, context.machine, driver_version(context.machine), used)
        return pin_limit(runtime, key, context.options, context.degrade, step=self._step)


def driver_version(machine: Machine) -> str:
    """What the machine's facts say of a driver's version; "" where they say nothing."""
    answers = [value for key, value in sorted(machine.observed.items()) if key.endswith(":driver")]
    versions = [answer.get("version") for answer in answers if isinstance(answer, dict)]
    return ", ".join(str(version) for version in versions if version)


def build(context: AllocatorContext) -> Allocator:
    """The allocator of the record `wsl`. Raises PluginError for a backend without a runtime."""
    runtime = getattr(context.backend, "runtime", None)
    if not isinstance(runtime, Runtime):
        raise PluginError(
            f"allocator 'wsl' cannot serve {type(context.backend).__name__}",
            "it pins memory for devices, and that backend has no runtime that could",
            "use --allocator auto",
        )
    return WslAllocator(context, runtime)


def pins(_machine: Machine, options: Mapping[str, Any]) -> int | None:
    """What STRATA_PIN_LIMIT_GIB gives; without it only a start finds out."""
    given = options.get("pin_limit_gib")
    return None if given is None else int(given * 2**30)
