"""What one region of host memory holds, so that all of it is given back in the right order.

A driver's refusal is a fact to note, not an error: the steps answer None or False then, and keep
the reason.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from attrs import frozen

from strata_core.errors import DeviceError, Refused, StrataError
from strata_core.interfaces import Span
from strata_core.memory.ledger import PINNED, RAM, Claim, Ledger
from strata_core.memory.platform import Reserved, SystemMemory
from strata_core.memory.slices import Slice
from strata_core.runtime import Runtime

_LOG = logging.getLogger("strata.memory")


@frozen(eq=False, kw_only=True)
class Host:
    """Who is asked for memory: the accelerator, the system, and the account of both.

    `device` is the one whose aliases spans hold; its context is open.
    """

    runtime: Runtime
    ledger: Ledger
    system: SystemMemory
    device: int = 0


class Holding:
    """The memory of one region. One thread at a time.

    After `close` nothing is held, unless the driver refuses twice to give something up: then that
    memory stays mapped and claimed, because unmapping registered memory breaks later calls.
    """

    def __init__(self, host: Host, nbytes: int, purpose: str) -> None:
        self._host, self._purpose = host, purpose
        self._one: tuple[int, Claim] | None = None
        self._registered: list[tuple[int, Claim]] = []
        self._locked: list[tuple[int, int]] = []
        self._reserved: Reserved | None = None
        self.refusals: list[str] = []
        self._claim: Claim | None = host.ledger.take(RAM, nbytes, purpose)

    @property
    def has_one(self) -> bool:
        """Whether it holds one page-locked allocation."""
        return self._one is not None

    @property
    def in_large_pages(self) -> bool:
        """Whether its memory is of the system's pool of large pages."""
        return self._reserved is not None and self._reserved.large

    def allocate(self, nbytes: int) -> Span | None:
        """One page-locked allocation that the device can address."""
        claim = self._claim_pins(nbytes)
        if claim is None:
            return None
        try:
            address = self._host.runtime.host_alloc(nbytes)
        except BaseException as error:
            claim.release()
            if not isinstance(error, DeviceError):
                raise
            self._note("one page-locked allocation", error)
            return None
        self._one = (address, claim)
        alias = self._alias(address)
        if alias is None:
            kept = self._undo(self._free_one)
            if kept is not None:
                raise kept
            self.refusals.append("one page-locked allocation has no address on the device")
            return None
        return Span(address, nbytes, alias, pinned=True)

    def reserve(self, nbytes: int, *, large: bool) -> int:
        """Plain memory, not touched yet; its address. Raises StrataError."""
        try:
            self._reserved = self._host.system.reserve(nbytes, large=large)
        except OSError as error:
            raise StrataError(
                f"cannot reserve {nbytes / 2**30:.2f} GiB of host memory for {self._purpose}",
                f"the operating system refused: {error}",
                "close other programs, or choose --source mmap",
            ) from error
        return self._reserved.address

    def register(self, part: Slice) -> Span | None:
        """Page-lock a slice of the plain memory."""
        address = self._address + part.start
        claim = self._claim_pins(part.nbytes)
        if claim is None:
            return None
        try:
            self._host.runtime.register(address, part.nbytes)
        except BaseException as error:
            claim.release()
            if not isinstance(error, DeviceError):
                raise
            self._note(f"slice {len(self._registered)}", error)
            return None
        self._registered.append((address, claim))
        return Span(address, part.nbytes, self._alias(address), pinned=True)

    def lock(self, part: Slice) -> str | None:
        """Keep a slice of the plain memory in RAM; None, or why that is not possible."""
        why = self._host.system.lock(self._address + part.start, part.nbytes)
        if why is None:
            self._locked.append((self._address + part.start, part.nbytes))
        return why

    def unreserve(self) -> None:
        """Give back the plain memory, of which nothing may be registered."""
        self._unlock()
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._host.system.free(reserved)

    def close(self) -> None:
        """Give everything back: registrations before the memory they lie in. Raises DeviceError."""
        error = self._undo(self._free_one)
        while self._registered:
            address, claim = self._registered[-1]
            error = error or self._undo(lambda at=address: self._host.runtime.unregister(at))  # type: ignore[misc]
            if error is not None:
                break
            self._registered.pop()
            claim.release()
        if error is not None:
            raise error
        self.unreserve()
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    @property
    def _address(self) -> int:
        if self._reserved is None:
            raise StrataError(
                f"the memory of {self._purpose} was given back",
                "a slice of it is still worked on",
                "this is an error in the caller; please report it",
            )
        return self._reserved.address

    def _claim_pins(self, nbytes: int) -> Claim | None:
        try:
            return self._host.ledger.take(PINNED, nbytes, self._purpose)
        except Refused as refusal:
            self.refusals.append(f"{refusal.what}: {refusal.why}")
            return None

    def _alias(self, address: int) -> int | None:
        try:
            return self._host.runtime.alias(address, self._host.device)
        except DeviceError as error:
            self._note("its address on the device", error)
            return None

    def _note(self, what: str, error: DeviceError) -> None:
        """Keep the reason of a refusal, and clear what the driver keeps pending."""
        self._clear()
        self.refusals.append(f"{what} was refused: {error.what}: {error.why}")

    def _free_one(self) -> None:
        if self._one is not None:
            self._host.runtime.host_free(self._one[0])
            self._one[1].release()
            self._one = None

    def _unlock(self) -> None:
        while self._locked:
            self._host.system.unlock(*self._locked.pop())

    def _undo(self, action: Callable[[], None]) -> DeviceError | None:
        """Carry out a giving back; once more where an error was pending. The error that stays."""
        try:
            action()
        except DeviceError as first:
            self._clear()
            _LOG.warning("%s: %s: %s; trying again", self._purpose, first.what, first.why)
            try:
                action()
            except DeviceError as second:
                self._clear()
                return second
        return None

    def _clear(self) -> None:
        """Clear what the driver keeps pending; asked twice, as the first answer may be an error."""
        for _ in range(2):
            with contextlib.suppress(DeviceError):
                self._host.runtime.take_error()
                return
