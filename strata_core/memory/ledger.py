"""The one account of bytes that are placed: page-locked host memory, other host memory, VRAM.

Every part that places something on a device, locks it or keeps it in memory takes a claim here
first and gives it back when the memory is freed. A backend owns one ledger; its allocators, caches
and buffers share it, so that several plugins cannot each use up the same limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

from attrs import field, frozen

from strata_core.errors import Refused, StrataError

PINNED = "pinned"
"""Host memory that is page-locked for a device."""

RAM = "ram"
"""Host memory that is not."""


def vram(device: int) -> str:
    """The pool of a device's memory."""
    return f"vram{device}"


@frozen(eq=False)
class Claim:
    """Bytes of a pool that belong to `purpose` until `release`. Any thread may release it."""

    pool: str
    nbytes: int
    purpose: str
    small: bool
    _ledger: Ledger

    def release(self) -> None:
        """Give the bytes back; the memory must be free by then. Again, it does nothing."""
        self._ledger._drop(self)  # noqa: SLF001 - a claim is the ledger's own other half


@frozen(eq=False)
class _Pool:
    """What one pool may hold, and what it holds."""

    limit: int | None = None
    margin: int = 0
    used: int = 0
    peak: int = 0


@frozen(eq=False)
class Ledger:
    """Claims on the pools `pinned`, `ram` and `vram0` to `vramN`, for `devices` devices.

    A pool's `limit` is the most that all its claims may have together (None: no limit known).
    Its `margin` is the part of the limit that only claims marked `small` may use. Sizes are bytes.
    Any thread may call any method.
    """

    devices: int = 0
    _pools: dict[str, _Pool] = field(factory=dict, init=False, repr=False)
    _claims: dict[Claim, None] = field(factory=dict, init=False, repr=False)
    _lock: Lock = field(factory=Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in (PINNED, RAM, *(vram(device) for device in range(self.devices))):
            self._pools[name] = _Pool()

    def limit(self, pool: str, limit: int | None, margin: int = 0) -> None:
        """Set a pool's limit and margin; claims that are over it already stay."""
        with self._lock:
            old = self._pool(pool)
            self._pools[pool] = _Pool(limit, margin, old.used, old.peak)

    def take(self, pool: str, nbytes: int, purpose: str, *, small: bool = False) -> Claim:
        """Claim `nbytes` of a pool for `purpose`; `small` claims may use the pool's margin.

        Raises Refused, naming pool, purpose, what is needed and what there is, where they would go
        over the limit; then nothing is claimed.
        """
        if nbytes < 0:
            raise StrataError(
                f"{nbytes} bytes of {pool} memory cannot be claimed for {purpose}",
                "a claim counts bytes, none or more",
                "this is an error in the caller; please report it",
            )
        claim = Claim(pool, nbytes, purpose, small, self)
        with self._lock:
            room = self._room(self._pool(pool), small)
            if room is not None and nbytes > room:
                raise self._refusal(claim, max(room, 0))
            self._claims[claim] = None
            self._count(pool, nbytes)
        return claim

    def room(self, pool: str, *, small: bool = False) -> int | None:
        """Bytes that a claim can still have, None where there is no limit."""
        with self._lock:
            room = self._room(self._pool(pool), small)
        return None if room is None else max(room, 0)

    def used(self, pool: str) -> int:
        """Bytes claimed now."""
        with self._lock:
            return self._pool(pool).used

    def peak(self, pool: str) -> int:
        """Most bytes that were claimed at once so far."""
        with self._lock:
            return self._pool(pool).peak

    def outstanding(self, pool: str | None = None) -> tuple[Claim, ...]:
        """Claims not given back, of one pool or of all, oldest first."""
        with self._lock:
            return tuple(claim for claim in self._claims if pool in (None, claim.pool))

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.outstanding())

    def _drop(self, claim: Claim) -> None:
        with self._lock:
            if claim in self._claims:
                del self._claims[claim]
                self._count(claim.pool, -claim.nbytes)

    # with the lock held

    def _pool(self, name: str) -> _Pool:
        found = self._pools.get(name)
        if found is None:
            raise StrataError(
                f"there is no memory pool {name!r}",
                f"the pools are {', '.join(self._pools)}",
                "this is an error in the caller; please report it",
            )
        return found

    @staticmethod
    def _room(pool: _Pool, small: bool) -> int | None:
        if pool.limit is None:
            return None
        return pool.limit - (0 if small else pool.margin) - pool.used

    def _count(self, name: str, nbytes: int) -> None:
        pool = self._pools[name]
        used = pool.used + nbytes
        self._pools[name] = _Pool(pool.limit, pool.margin, used, max(pool.peak, used))

    def _refusal(self, claim: Claim, have: int) -> Refused:
        pool = self._pools[claim.pool]
        limit = _mib(pool.limit or 0)
        margin = "" if claim.small or not pool.margin else f", {_mib(pool.margin)} kept for small"
        return Refused(
            f"{_mib(claim.nbytes)} of {claim.pool} memory for {claim.purpose} cannot be had",
            f"{_mib(have)} are left of {limit} ({_mib(pool.used)} in use{margin})",
            "raise the limit, or make another part smaller",
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
