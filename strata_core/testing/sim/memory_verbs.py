"""The simulator's verbs of devices and memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_core.memory.address import bytes_at
from strata_core.runtime import Device, DeviceMemory, WaitClock
from strata_core.testing.sim.blocks import PAGE, Mappings
from strata_core.testing.sim.failure import (
    ALREADY_MAPPED,
    ALREADY_PINNED,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    broken,
    size,
)
from strata_core.testing.sim.verbs import SimState, verb
from strata_core.testing.sim.work import Use


class MemoryVerbs(SimState):
    """Devices, device memory, page-locked memory; and what tests ask about memory."""

    @verb
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return tuple(
            Device(
                index=index,
                label=f"{self.label}{index}",
                name="simulated accelerator",
                architecture="sim",
                total=total,
                units=4,
                warp=32,
                matrix=self.hardware.matrix,
            )
            for index, total in enumerate(self.hardware.vram)
        )

    @verb
    def open_context(self, device: int) -> None:
        """A context takes its share of the pin budget, until close."""
        self.need_device(device, "open_context")
        if device in self.contexts:
            return
        self.places.take_pins(self.hardware.context_pins, f"the context of {self.label}{device}")
        self.account.pin("contexts", self.hardware.context_pins)
        self.contexts.add(device)

    @verb
    def memory(self, device: int) -> DeviceMemory:
        """Free and total bytes."""
        self.need_context(device, "memory")
        total = self.hardware.vram[device]
        return DeviceMemory(total - self.account.vram[device].now, total)

    def take_error(self) -> str | None:
        """This thread's pending error, cleared; works while one is pending."""
        with self.lock:
            self.enter("take_error", heed_error=False)
            return self.taken()

    @verb
    def alloc(self, device: int, nbytes: int) -> int:
        """Device memory, its first MiB filled with 0xFF."""
        self.need_context(device, "alloc")
        _need_bytes(nbytes, "alloc")
        return self.places.allocate(device, nbytes)

    @verb
    def free(self, device: int, address: int) -> None:
        """Give device memory back."""
        self.need_context(device, "free")
        found = self.places.allocation(address, device)
        self._need_idle(address, found.block.nbytes, "free")
        self.places.free(found)

    @verb
    def host_alloc(self, nbytes: int) -> int:
        """Page-locked memory, its first MiB filled with 0xFF."""
        self.need_any_context("host_alloc")
        _need_bytes(nbytes, "host_alloc")
        return self.places.host_alloc(nbytes)

    @verb
    def host_free(self, address: int) -> None:
        """Give page-locked memory back."""
        self.need_any_context("host_free")
        pin = self.places.pin_at(address, "host_alloc", "host_free")
        self._need_idle(address, pin.nbytes, "host_free")
        self.places.unpin(pin)

    @verb
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock the caller's memory."""
        self.need_any_context("register")
        _need_bytes(nbytes, "register")
        if address % PAGE or nbytes % PAGE:
            raise broken(
                f"register: {nbytes} bytes at {address:#x} are not whole pages",
                INVALID_VALUE,
                f"pages are {PAGE} bytes",
                "register whole pages",
            )
        self.places.check_registrations("register")
        if self.places.pins.overlapping(address, address + nbytes):
            raise broken(
                f"register: a part of {nbytes} bytes at {address:#x} is page-locked already",
                ALREADY_PINNED,
                "registrations do not overlap",
                "register each page once",
            )
        own = self.places.allocations.overlapping(address, address + nbytes)
        if own or not Mappings().hold(address, nbytes):
            raise broken(
                f"register: {nbytes} bytes at {address:#x} are not host memory",
                INVALID_VALUE,
                "memory is mapped before it is registered, and is not a device's",
                "register memory that exists",
            )
        self.places.register(address, nbytes)

    @verb
    def unregister(self, address: int) -> None:
        """Undo a registration."""
        self.need_any_context("unregister")
        pin = self.places.pin_at(address, "registered", "unregister")
        if not Mappings().hold(address, pin.nbytes):
            self.places.unpin(pin)  # there is nothing left that could be undone later
            raise broken(
                f"unregister: {size(pin.nbytes)} at {address:#x} are not mapped any more",
                ALREADY_MAPPED,
                "memory stays mapped until it is unregistered",
                "unregister before unmapping",
            )
        self._need_idle(address, pin.nbytes, "unregister")
        self.places.unpin(pin)

    @verb
    def alias(self, address: int, device: int) -> int | None:
        """Where a device finds page-locked memory."""
        self.need_context(device, "alias")
        pin = self.places.pins.at(address)
        if pin is None or pin.alias is None:
            return None
        return pin.alias + address - pin.address

    # what tests and host kernels ask

    def reach(
        self, device: int, address: int, nbytes: int, *, write: bool = False
    ) -> NDArray[np.uint8]:
        """The bytes that a device finds at an address, as a writable array; for host kernels.

        Raises DeviceError unless they are live memory of that device, or page-locked memory by its
        alias, in one piece, and no queued work collides with the use. Counts nothing: a kernel
        tells what it moved over the link with `note_link`.
        """
        with self.lock, self.recorded():
            self.need_context(device, "reach")
            place = self.places.reach(device, address, nbytes, "a kernel")
            self.places.still_there(place, "a kernel")
            self.queues.check_idle(Use(place.address, place.end, write), "a kernel")
            return bytes_at(place.address, nbytes)

    def link_rate(self, device: int) -> float:
        """What the hardware's link is said to move."""
        self.need_context(device, "link_rate")
        return self.hardware.link

    def wait_clock(self, device: int) -> WaitClock:
        """Kernels read the host's clock, in nanoseconds."""
        self.need_context(device, "wait_clock")
        return self.hardware.clock

    def note_link(self, device: int, *, read: int = 0, written: int = 0) -> None:
        """Count bytes that a kernel read from, or wrote to, host memory by its alias."""
        with self.lock:
            self.account.links[device].to_device += read
            self.account.links[device].from_device += written

    def check_idle(self, address: int, nbytes: int, *, write: bool = True) -> None:
        """Raise DeviceError where queued work uses memory that the host is about to use.

        With `write` any queued use of it is wrong, else only one that writes.
        """
        with self.lock, self.recorded():
            self._need_idle(address, nbytes, "the host", write=write)

    def note_unmapped(self, address: int, nbytes: int) -> None:
        """Host memory is about to be unmapped: raise DeviceError where it is still in use."""
        with self.lock, self.recorded():
            if any(
                p.block is None for p in self.places.pins.overlapping(address, address + nbytes)
            ):
                raise broken(
                    f"{size(nbytes)} at {address:#x} are unmapped while they are registered",
                    ILLEGAL_ADDRESS,
                    "memory stays mapped until it is unregistered",
                    "unregister before unmapping",
                )
            self._need_idle(address, nbytes, "unmapping")

    def _need_idle(self, address: int, nbytes: int, what: str, *, write: bool = True) -> None:
        self.queues.check_idle(Use(address, address + nbytes, write), what)


def _need_bytes(nbytes: int, verb: str) -> None:
    if nbytes <= 0:
        raise broken(
            f"{verb}: {nbytes} bytes",
            INVALID_VALUE,
            "memory has at least one byte",
            "ask for nothing by not asking",
        )
