"""How much host memory may be page-locked on this machine, and what says so.

A driver that is asked for more than it has may refuse, and then refuse the next one who asks; or it
may grant it and slow everything down. So page-locking stops below a limit by itself: what is known
of the driver (probed, or given by the user), else the budget of the adapters' shared memory where
the system has one, else what is available now.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from strata_core.memory.platform import SharedRoom, SystemMemory
from strata_core.plan.plan import gib

KNOWN_SHARE = 8
"""Of a known limit the margin is at most this part: a driver that pins 1 GiB has no 4 to spare."""


@frozen
class PinLimit:
    """What may be page-locked in all (None: nothing limits it).

    `margin` is the part of it that is kept for small buffers; `because` says it in words for logs,
    "" where there is no limit.
    """

    nbytes: int | None = None
    margin: int = 0
    because: str = ""


def known_limit(nbytes: int, margin: int, because: str) -> PinLimit:
    """The limit that was probed or given."""
    margin = min(margin, nbytes // KNOWN_SHARE)
    return PinLimit(nbytes, margin, f"{because} {gib(nbytes)}, of which {gib(margin)} stay free")


def machine_limit(system: SystemMemory, devices: Sequence[str], used: int, margin: int) -> PinLimit:
    """The limit that the machine itself suggests, asked anew.

    `devices` are product names; of several devices the one with the smallest room counts. `used` is
    what is page-locked already: what there is room for comes on top of it.
    """
    rooms = system.shared_rooms()
    if rooms:
        smallest = min(_of(rooms, devices), key=lambda shared: shared.room)
        return PinLimit(
            used + smallest.room,
            margin,
            f"{smallest.adapter} has room for {gib(smallest.room)} of shared memory, of which "
            f"{gib(margin)} stay free",
        )
    return available_limit(system.available(), used, margin)


def available_limit(available: int, used: int, margin: int) -> PinLimit:
    """The limit of a machine that has no budget for it: what is available."""
    return PinLimit(
        used + available,
        margin,
        f"{gib(available)} are available, of which {gib(margin)} stay free",
    )


def _of(rooms: Sequence[SharedRoom], devices: Sequence[str]) -> Sequence[SharedRoom]:
    """The adapters in use; all of them where names do not tell."""
    return [room for room in rooms if room.adapter in devices] or rooms
