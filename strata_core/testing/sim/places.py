"""Where memory is: what each device allocated, what of the host is page-locked, and the rest."""

from __future__ import annotations

from collections import deque
from typing import Literal

from attrs import define, field, frozen

from strata_core.errors import DeviceError
from strata_core.testing.sim.account import Account
from strata_core.testing.sim.blocks import (
    ALIGNMENT,
    Block,
    Mappings,
    mapped,
    page_up,
)
from strata_core.testing.sim.failure import (
    ALREADY_MAPPED,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    broken,
    refused,
    size,
)
from strata_core.testing.sim.hardware import SimHardware
from strata_core.testing.sim.ranges import Ranges

_QUARANTINE = 256
_APART = 1 << 60  # no system maps memory for a process there
_GAP = 1 << 30


@define(eq=False)
class Allocation:
    """Memory of a device; `freed` while its addresses are kept from being used again."""

    device: int
    block: Block
    freed: bool = False


@define(eq=False)
class Pin:
    """Page-locked host memory: one pinned allocation (with its block), or one registration."""

    address: int
    nbytes: int
    alias: int | None
    block: Block | None = None

    @property
    def kind(self) -> Literal["host_alloc", "registered"]:
        """What it was made by, as the account names it."""
        return "registered" if self.block is None else "host_alloc"

    @property
    def bytes_pinned(self) -> int:
        """What it takes of the budget."""
        return page_up(self.nbytes)


@frozen
class Place:
    """A range resolved: its host address, the device whose memory it is (None: the host's)."""

    address: int
    nbytes: int
    device: int | None
    pin: Pin | None = None

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.nbytes


@define(eq=False)
class Places:
    """All memory that the runtime knows, and the budgets that it comes from."""

    hardware: SimHardware
    account: Account
    allocations: Ranges[Allocation] = field(factory=Ranges)
    pins: Ranges[Pin] = field(factory=Ranges)
    kernel_log: list[str] = field(factory=list)
    _aliases: Ranges[Pin] = field(factory=Ranges)
    _freed: deque[Allocation] = field(factory=deque)
    _next_alias: int = _APART
    _frees: int = 0

    @property
    def version(self) -> int:
        """Another number after each change of what an address means."""
        ranges = (self.allocations, self.pins, self._aliases)
        return self._frees + sum(each.changes for each in ranges)

    # device memory

    def allocate(self, device: int, nbytes: int) -> int:
        """Memory of a device, exactly 256-aligned."""
        room = self.hardware.vram[device] - self.account.vram[device].now
        if _granted(nbytes) > room:
            raise refused(
                f"alloc: a device did not give {size(nbytes)}",
                f"{size(room)} of {size(self.hardware.vram[device])} are free",
                "place less on the device",
            )
        block = _map(nbytes, before=ALIGNMENT)
        self.allocations.add(block.address, nbytes, Allocation(device, block))
        self.account.vram[device].add(_granted(nbytes))
        return block.address

    def allocation(self, address: int, device: int) -> Allocation:
        """The live allocation that begins at `address` on a device, its ends not overwritten."""
        found = self.allocations.at(address)
        if found is None or found.block.address != address or found.device != device:
            raise broken(
                f"free: {address:#x} is not what alloc gave on device {device}",
                INVALID_VALUE,
                "memory is freed once, on its device, by the address that alloc gave",
                "free what was allocated",
            )
        if found.freed:
            raise broken(
                f"free: {address:#x} was freed already",
                INVALID_VALUE,
                "memory is freed once",
                "find who frees it twice",
            )
        self._check_guards(found.block, "free")
        return found

    def free(self, found: Allocation) -> None:
        """Give memory back; its addresses are not given out again for a while."""
        found.freed = True
        self._frees += 1
        self.account.vram[found.device].add(-_granted(found.block.nbytes))
        self._freed.append(found)
        if len(self._freed) > _QUARANTINE:
            oldest = self._freed.popleft()
            self.allocations.pop(oldest.block.address)
            oldest.block.unmap()

    # page-locked memory

    def take_pins(self, nbytes: int, what: str) -> None:
        """Refuse unless the budget has room for `nbytes` more; takes nothing."""
        budget = self.hardware.pin_budget
        if budget is not None and self.account.pinned.now + nbytes > budget:
            self.kernel_log.append(self.hardware.refusal_line)
            raise refused(
                f"{what} was not granted",
                f"it needs {size(nbytes)} of page-locked memory, and "
                f"{size(max(budget - self.account.pinned.now, 0))} of {size(budget)} are left",
                "pin less, or pin it earlier",
            )

    def host_alloc(self, nbytes: int) -> int:
        """Page-locked memory of the runtime's own, page-aligned."""
        self.check_registrations("host_alloc")
        self.take_pins(page_up(nbytes), f"host_alloc of {size(nbytes)}")
        block = _map(nbytes, before=0)
        self._add(Pin(block.address, nbytes, self._alias(block.address, nbytes), block))
        return block.address

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory of the caller's."""
        self.take_pins(nbytes, f"register of {size(nbytes)} at {address:#x}")
        self._add(Pin(address, nbytes, self._alias(address, nbytes)))

    def pin_at(self, address: int, kind: Literal["host_alloc", "registered"], verb: str) -> Pin:
        """The pin of that kind that begins at `address`."""
        pin = self.pins.at(address)
        if pin is None or pin.address != address or pin.kind != kind:
            raise broken(
                f"{verb}: {address:#x} is not the start of such memory",
                INVALID_VALUE,
                "what was pinned is given back once, by the address it was pinned with and by the "
                "verb that belongs to it",
                "give back what was taken",
            )
        if pin.block is not None:
            self._check_guards(pin.block, verb)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Undo a pinned allocation or a registration."""
        self.pins.pop(pin.address)
        if self.hardware.aliases == "apart" and pin.alias is not None:
            self._aliases.pop(pin.alias)
        self.account.pin(pin.kind, -pin.bytes_pinned)
        if pin.block is not None:
            pin.block.unmap()

    def unmapped_pins(self) -> list[Pin]:
        """Registrations whose memory is not mapped any more."""
        registered = [pin for pin in self.pins if pin.block is None]
        if not registered:
            return []
        now = Mappings()
        return [pin for pin in registered if not now.hold(pin.address, pin.nbytes)]

    def check_registrations(self, verb: str) -> None:
        """Refuse to pin while memory that is registered is not mapped."""
        gone = self.unmapped_pins()
        if gone:
            raise broken(
                f"{verb}: {size(gone[0].nbytes)} at {gone[0].address:#x} are registered, but not "
                "mapped any more",
                ALREADY_MAPPED,
                "memory stays mapped until it is unregistered",
                "unregister before unmapping",
            )

    # any memory

    def resolve(self, address: int, nbytes: int, verb: str) -> Place:
        """Where a range is; refuses freed memory and ranges that cross an end of what they are in.

        Host memory is given by its host address, or by the alias of page-locked memory.
        """
        end = address + nbytes
        touched = self.allocations.overlapping(address, end)
        if touched:
            found = touched[0]
            if found.freed:
                raise _lost(verb, address, "was freed")
            if address < found.block.address or end > found.block.address + found.block.nbytes:
                raise _lost(verb, address, f"with {nbytes} bytes goes beyond its allocation")
            return Place(address, nbytes, found.device)
        by_alias = self._aliases.at(address)
        if by_alias is not None and by_alias.alias is not None:
            address += by_alias.address - by_alias.alias
        pins = self.pins.overlapping(address, address + nbytes)
        if not pins:
            return Place(address, nbytes, None)
        pin = pins[0]
        if address < pin.address or address + nbytes > pin.address + pin.nbytes:
            raise broken(
                f"{verb}: {nbytes} bytes at {address:#x} lie "
                + ("in two registrations" if len(pins) > 1 else "in and beside a registration"),
                INVALID_VALUE,
                "the host side of a copy is in one registration, or in none",
                "cut the copy where the registrations meet, or let the CPU do it",
            )
        return Place(address, nbytes, None, pin)

    def reach(self, device: int, address: int, nbytes: int, what: str) -> Place:
        """Where a device finds a range: its own memory, or page-locked memory by its alias."""
        place = self.resolve(address, nbytes, what)
        if place.device is not None and place.device != device:
            raise _lost(what, address, f"is memory of device {place.device}, not of {device}")
        if place.device is None:
            pin = place.pin
            if pin is None or pin.alias is None:
                raise _lost(what, address, "is host memory that no device addresses")
            if not pin.alias <= address < pin.alias + pin.nbytes:
                raise _lost(what, address, "is a host address; a device finds it at its alias")
        return place

    def still_there(self, place: Place, verb: str) -> None:
        """Refuse to touch host memory that was unmapped."""
        own = place.device is not None or (place.pin is not None and place.pin.block is not None)
        if not own and not mapped(place.address, place.nbytes):
            raise _lost(verb, place.address, "was unmapped before the work was done")

    def left(self) -> list[str]:
        """One line for each piece of memory that is not given back."""
        return [
            f"alloc of {size(item.block.nbytes)} on device {item.device}"
            for item in self.allocations
            if not item.freed
        ] + [f"{pin.kind} of {size(pin.nbytes)}" for pin in self.pins]

    def overwritten(self) -> list[str]:
        """One line for each live block whose ends were written over."""
        blocks = [item.block for item in self.allocations if not item.freed]
        blocks += [pin.block for pin in self.pins if pin.block is not None]
        return [
            f"{size(block.nbytes)} at {block.address:#x} were written beyond their ends"
            for block in blocks
            if not block.intact()
        ]

    def clear(self) -> None:
        """Unmap everything."""
        for item in self.allocations:
            self.allocations.pop(item.block.address)
            if not item.freed:
                self.account.vram[item.device].add(-_granted(item.block.nbytes))
            item.block.unmap()
        self._freed.clear()
        for pin in self.pins:
            self.unpin(pin)

    def _add(self, pin: Pin) -> None:
        self.pins.add(pin.address, pin.nbytes, pin)
        if self.hardware.aliases == "apart" and pin.alias is not None:
            self._aliases.add(pin.alias, pin.nbytes, pin)
        self.account.pin(pin.kind, pin.bytes_pinned)

    def _alias(self, address: int, nbytes: int) -> int | None:
        if self.hardware.aliases != "apart":
            return address if self.hardware.aliases == "same" else None
        alias = self._next_alias
        self._next_alias += page_up(nbytes) + _GAP
        return alias

    def _check_guards(self, block: Block, verb: str) -> None:
        if not block.intact():
            block.mend()
            raise _lost(
                verb, block.address, f"was written beyond its {size(block.nbytes)}, by anybody"
            )


def _granted(nbytes: int) -> int:
    """What an allocation takes of a device's memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _lost(verb: str, address: int, why: str) -> DeviceError:
    return broken(
        f"{verb}: {address:#x} {why}",
        ILLEGAL_ADDRESS,
        "work touches memory that is live, as a whole, where it may",
        "keep memory until the work on it is done, and keep within it",
    )


def _map(nbytes: int, before: int) -> Block:
    try:
        return Block.map(nbytes, before)
    except (OSError, OverflowError, ValueError) as error:
        raise refused(
            f"the simulator got no {size(nbytes)}",
            f"the operating system refused them: {error}",
            "simulate a smaller machine",
        ) from error
