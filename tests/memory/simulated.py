"""A simulated driver and a system that record what is asked of them, and allocators over both."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

from strata_core.errors import Degradation
from strata_core.memory.address import bytes_at
from strata_core.memory.holding import Host
from strata_core.memory.ledger import Ledger
from strata_core.memory.pinned import PinnedAllocator
from strata_core.memory.platform import Reserved, SharedRoom
from strata_core.memory.platform.posix import PosixMemory
from strata_core.memory.rules import PinSettings
from strata_core.testing.sim import SimFaults, SimHardware, SimRuntime

PAGE = 4096
MIB = 1 << 20


class Driver(SimRuntime):
    """Checks at each registration that nothing was written to the slice or the one before it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.registered: list[tuple[int, int]] = []
        self.written_before: list[tuple[int, int]] = []
        self.beginnings: set[int] = set()  # of reserved memory: what lies before is another's
        self._guard = RLock()

    def register(self, address: int, nbytes: int) -> None:
        with self._guard:
            around = [(address, nbytes)]
            first = address in self.beginnings
            if not first and self.registered and sum(self.registered[-1]) == address:
                around.append(self.registered[-1])
            self.written_before += [piece for piece in around if bytes_at(*piece).any()]
            super().register(address, nbytes)
            self.registered.append((address, nbytes))


class System(PosixMemory):
    """Linux's calls, with a limit on locking, budgets and sizes that a test chooses."""

    def __init__(self, runtime: Driver | None = None) -> None:
        super().__init__()
        self.runtime = runtime
        self.held: dict[int, Reserved] = {}
        self.locked: dict[int, int] = {}
        self.lock_most: int | None = None
        self.have = 1 << 40
        self.rooms: tuple[SharedRoom, ...] | None = None
        self.populated: list[tuple[int, int]] = []
        self.fail_populate = False

    def reserve(self, nbytes: int, *, large: bool = False) -> Reserved:
        reserved = super().reserve(nbytes, large=large)
        self.held[reserved.address] = reserved
        if self.runtime is not None:
            self.runtime.beginnings.add(reserved.address)
        return reserved

    def free(self, reserved: Reserved) -> None:
        if self.runtime is not None:
            self.runtime.note_unmapped(reserved.address, reserved.nbytes)
            self.runtime.beginnings.discard(reserved.address)
        del self.held[reserved.address]
        super().free(reserved)

    def populate(self, address: int, nbytes: int) -> None:
        if self.fail_populate:
            raise OSError(12, "Cannot allocate memory")
        self.populated.append((address, nbytes))
        super().populate(address, nbytes)

    def lock(self, address: int, nbytes: int) -> str | None:
        if self.lock_most is not None and sum(self.locked.values()) + nbytes > self.lock_most:
            return f"the limit is {self.lock_most}"
        self.locked[address] = nbytes
        return None

    def unlock(self, address: int, nbytes: int) -> None:
        assert self.locked.pop(address) == nbytes

    def lock_limit(self) -> int | None:
        return self.lock_most

    def available(self) -> int:
        return self.have

    def shared_rooms(self) -> tuple[SharedRoom, ...] | None:
        return self.rooms


class Bench:
    """One simulated machine: driver, system, ledger, allocator, and what was reported."""

    def __init__(
        self,
        pin_budget: int | None = None,
        refuse: dict[str, Any] | None = None,
        aliases: str = "apart",
        prepare: Callable[[System], None] | None = None,
        **settings: Any,
    ) -> None:
        hardware = SimHardware(vram=(MIB,), pin_budget=pin_budget, context_pins=0, aliases=aliases)
        self.runtime = Driver(hardware, faults=SimFaults(refuse or {}))
        self.runtime.open_context(0)
        self.system = System(self.runtime)
        if prepare:
            prepare(self.system)
        self.ledger = Ledger(devices=1)
        self.degradations: list[Degradation] = []
        policy = settings.pop("policy", None)
        self.allocator = PinnedAllocator(
            Host(runtime=self.runtime, ledger=self.ledger, system=self.system),
            PinSettings(**settings),
            self.degradations.append,
            threads=2,
            names=("simulated accelerator",),
            **({"policy": policy} if policy else {}),
        )

    def finish(self) -> None:
        """Close everything; nothing may be left, and no rule may have been broken."""
        self.allocator.close()
        assert self.ledger.outstanding() == ()
        assert self.system.held == {}
        assert self.system.locked == {}
        assert self.runtime.leaks() == []
        assert self.runtime.written_before == []
        self.runtime.close()
