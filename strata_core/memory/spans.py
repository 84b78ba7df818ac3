"""Which span of a region holds a piece of it, and where a device finds that piece."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from strata_core.interfaces import Region, Span

_ADDRESS = attrgetter("address")


def span_of(region: Region, address: int, nbytes: int) -> Span | None:
    """The span that holds all of the bytes at `address`; None where no single one does.

    A copy whose bytes lie in two registrations fails, and an alias holds for one of them alone.
    """
    at = bisect_right(region.spans, address, key=_ADDRESS) - 1
    if at < 0:
        return None
    span = region.spans[at]
    return span if address + nbytes <= span.address + span.nbytes else None


def reach(region: Region, address: int, nbytes: int) -> tuple[bool, int | None]:
    """Whether a copy engine may read the bytes at `address`, and their device address if any."""
    span = span_of(region, address, nbytes)
    if span is None or not span.pinned:
        return False, None
    return True, None if span.alias is None else span.alias + (address - span.address)
