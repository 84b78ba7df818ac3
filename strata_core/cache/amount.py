"""How many experts a cache holds: a number that was asked for, or what really fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import frozen

from strata_core.cache.slots import fitting
from strata_core.errors import Degradation, Refused
from strata_core.interfaces import BlobLayout, Expert
from strata_core.memory.ledger import Ledger, vram
from strata_core.plan.devices import default_reserve
from strata_core.runtime import Runtime

MIB = 1 << 20
SCARCE = 256 * MIB
"""Less free memory than this, or a fiftieth of a small device's, slows every phase down."""

Amount = int | Literal["auto"]
"""Experts to hold."""

_log = logging.getLogger("strata.cache")


@frozen
class Wish:
    """What the user asked of one device's cache: the amount, and bytes to leave free (None: auto).

    `flag` names it in messages.
    """

    amount: Amount
    reserve: int | None
    flag: str


def choose(
    runtime: Runtime,
    ledger: Ledger,
    device: int,
    ranking: Sequence[Expert],
    layouts: Mapping[int, BlobLayout],
    wish: Wish,
) -> tuple[Expert, ...]:
    """The experts that a device is to hold, best first; at most all of `ranking`.

    `auto` counts what is free now less the reserve, and what the ledger still grants.
    """
    if wish.amount != "auto":
        return tuple(ranking[: wish.amount])
    memory = runtime.memory(device)
    room = memory.free - reserve_of(memory.total, wish.reserve)
    granted = ledger.room(vram(device))
    return fitting(ranking, layouts, room if granted is None else min(room, granted))


def no_spares(label: str, flag: str, error: Refused) -> Degradation:
    """What to report where there is room for a cache, but not for empty slots beside it."""
    return Degradation(
        what=f"experts do not change places on {label}",
        why=f"{flag} leaves no room for empty slots to enter through: {error.what}",
        cost="the cache keeps the experts that it starts with, whatever the text asks for",
        remedy=f"make {flag} smaller, or set it to auto",
    )


def few_buffers(label: str, count: int, error: Refused) -> Degradation:
    """What to report where experts change places through the buffers of filling alone."""
    return Degradation(
        what=f"experts change places on {label} through {count} buffers",
        why=f"more were refused: {error.what}",
        cost="experts outside page-locked memory enter the cache more slowly",
        remedy="pin less elsewhere; `strata doctor` says what this machine's driver pins",
    )


def reserve_of(total: int, asked: int | None) -> int:
    """Bytes that `auto` leaves free on a device with `total` bytes."""
    return default_reserve(total) if asked is None else asked


def scarcity(runtime: Runtime, device: int, flag: str) -> Degradation | None:
    """What to report where a filled cache leaves a device almost no free memory; logged too."""
    memory = runtime.memory(device)
    if memory.free >= min(SCARCE, memory.total // 50):
        return None
    label = f"{runtime.label}{device}"
    what = f"only {memory.free // MIB} MiB of VRAM free"
    _log.warning("%s on %s", what, label)
    return Degradation(
        what=f"{what} on {label}",
        why=f"{flag} fills the device",
        cost="the driver moves memory about, and every phase can be several times slower",
        remedy=f"make {flag} smaller, or set it to auto",
    )
