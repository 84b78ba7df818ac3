"""The allocator of page-locked host memory, for every runtime; policies come from settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from attrs import frozen

from strata_core.errors import Degradation, PluginError
from strata_core.interfaces import Allocator, AllocatorContext, Region, StartPolicy
from strata_core.memory.chain import Preparation, Wish
from strata_core.memory.holding import Host
from strata_core.memory.ledger import PINNED, Ledger
from strata_core.memory.limits import PinLimit, known_limit, machine_limit
from strata_core.memory.platform import populate_threads, system_memory
from strata_core.memory.preparing import Prepared
from strata_core.memory.rules import LimitKind, PinRule, PinSettings
from strata_core.runtime import Runtime

POLICY = StartPolicy(embedding="pinned")
"""Small pinned buffers first, the token embedding in mapped memory, contexts when needed."""


@frozen(eq=False)
class _Loan:
    """A preparation, and the allocator that keeps it."""

    _preparation: Preparation
    _owner: PinnedAllocator

    @property
    def address(self) -> int:
        return self._preparation.address

    def wait(self, start: int, nbytes: int) -> None:
        self._preparation.wait(start, nbytes)

    def region(self) -> Region:
        return self._preparation.region()

    def close(self) -> None:
        self._owner.give_back(self._preparation)


class PinnedAllocator:
    """Gives host memory by the chain pinned, sliced, locked. Any thread may call it.

    `host` says who is asked; `names` are the product names of the devices in use. What is
    page-locked is claimed in the ledger, whose pool `pinned` gets its limit here: when the
    allocator is made, and anew for each region that has a limit. `threads` populate memory.
    """

    def __init__(
        self,
        host: Host,
        settings: PinSettings,
        degrade: Callable[[Degradation], None],
        *,
        policy: StartPolicy = POLICY,
        names: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        self._host, self._settings, self._degrade = host, settings, degrade
        self._policy, self._names = policy, tuple(names)
        self._threads = threads
        self._held: dict[int, Preparation] = {}
        self._lock = Lock()
        self._set_limit("machine")

    @property
    def start_policy(self) -> StartPolicy:
        """The policy it was made with."""
        return self._policy

    def prepare(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Prepared:
        """Host memory that may be filled from its beginning while the rest is made ready.

        Raises StrataError where not even pageable memory can be had; then nothing is held.
        """
        preparation = Preparation(
            self._host,
            self._wish(nbytes, cuts, purpose, self._settings.rule(purpose)),
            self._degrade,
        )
        preparation.begin()
        with self._lock:
            self._held[preparation.address] = preparation
        return _Loan(preparation, self)

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        """Host memory with all of its spans settled. Raises StrataError as `prepare` does."""
        loan = self.prepare(nbytes, cuts, purpose)
        try:
            return loan.region()
        except BaseException:
            loan.close()
            raise

    def regions(self) -> tuple[Region, ...]:
        """What is held now, each region once all of its spans are settled."""
        with self._lock:
            held = list(self._held.values())
        return tuple(preparation.region() for preparation in held)

    def release(self, region: Region) -> None:
        """Unregister and unmap a region. Raises DeviceError where the driver keeps a part of it."""
        with self._lock:
            preparation = self._held[region.address]
        self.give_back(preparation)

    def give_back(self, preparation: Preparation) -> None:
        """Release a preparation, finished or not, once."""
        with self._lock:
            if self._held.get(preparation.address) is not preparation:
                return
            del self._held[preparation.address]
        preparation.close()

    def close(self) -> None:
        """Release whatever is left. Raises the first DeviceError after all was tried."""
        with self._lock:
            held, self._held = list(self._held.values()), {}
        error: BaseException | None = None
        for preparation in held:
            try:
                preparation.close()
            except BaseException as failure:  # noqa: BLE001 - the others are released first
                error = error or failure
        if error is not None:
            raise error

    def _wish(self, nbytes: int, cuts: Sequence[int], purpose: str, rule: PinRule) -> Wish:
        with self._lock:
            limit = self._set_limit(rule.limit)
            room = self._host.ledger.room(PINNED)
        most, because, clamped = rule.most, rule.because, False
        if room is not None and (most is None or room < most):
            most, because, clamped = room, limit.because, True
        return Wish(
            nbytes=nbytes,
            cuts=cuts,
            purpose=purpose,
            most=most,
            because=because,
            clamped=clamped,
            one_first=rule.one_first,
            refuse_one=rule.refuse_one,
            prefix=rule.prefix,
            threads=self._threads,
            large=self._settings.large,
        )

    def _set_limit(self, kind: LimitKind) -> PinLimit:
        """Find the limit out and have the ledger keep it."""
        limit = self._limit(kind)
        self._host.ledger.limit(PINNED, limit.nbytes, limit.margin)
        return limit

    def _limit(self, kind: LimitKind) -> PinLimit:
        margin = self._settings.margin
        if kind == "none":
            return PinLimit()
        if self._settings.known is not None:
            return known_limit(self._settings.known, margin, "STRATA_PIN_LIMIT_GIB is")
        if self._policy.pin_limit is not None:
            return known_limit(self._policy.pin_limit, margin, "the driver page-locks")
        if kind == "known":
            return PinLimit()
        used = self._host.ledger.used(PINNED)
        return machine_limit(self._host.system, self._names, used, margin)


def build(context: AllocatorContext, policy: StartPolicy = POLICY) -> Allocator:
    """A pinned allocator for the backend that was built.

    It is one over a runtime: an object with the attributes `runtime`, `ledger` and `devices` (the
    indices in use, the first one first). Raises PluginError for another.
    """
    backend = context.backend
    runtime, ledger = getattr(backend, "runtime", None), getattr(backend, "ledger", None)
    used = tuple(getattr(backend, "devices", ()))
    if not isinstance(runtime, Runtime) or not isinstance(ledger, Ledger) or not used:
        raise PluginError(
            f"{type(backend).__name__} has no runtime that could page-lock memory",
            "an allocator of pinned memory works for backends with devices",
            "choose another with --allocator",
        )
    return PinnedAllocator(
        Host(runtime=runtime, ledger=ledger, system=system_memory(), device=used[0]),
        PinSettings.of(context.options),
        context.degrade,
        policy=policy,
        names=[found.name for found in runtime.devices() if found.index in used],
        threads=populate_threads(context.machine),
    )
