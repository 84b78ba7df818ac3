"""An allocator that keeps account of what it gave, cuts what it gives, and can refuse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve

from strata_core.errors import StrataError
from strata_core.interfaces import Region, Span, StartPolicy
from strata_core.memory.host import HostAllocator

ALIAS_DISTANCE = 1 << 50
"""What an address differs from its alias by; no two spans have the same distance."""


class WatchedAllocator:
    """Host memory with a span for every `spans_of` cuts, each with an alias of its own.

    `outstanding` are the regions not given back; `refuse` is the number of the `reserve` (from 1)
    that is refused, None for none. Thread-safe as far as `HostAllocator` is: the tests that count
    use one thread.
    """

    def __init__(
        self, *, spans_of: int = 3, refuse: int | None = None, pinned: bool = True
    ) -> None:
        self._host = HostAllocator()
        self._spans_of, self._refuse, self._pinned = spans_of, refuse, pinned
        self.calls = 0
        self.outstanding: dict[int, Region] = {}
        self.given: list[Region] = []

    @property
    def start_policy(self) -> StartPolicy:
        """The plain order."""
        return StartPolicy()

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        """Memory cut at some of `cuts`, or the refusal that was asked for."""
        self.calls += 1
        if self.calls == self._refuse:
            raise StrataError(
                f"cannot reserve {nbytes} bytes for {purpose}",
                "this test refuses them",
                "nothing: a source must cope with it",
            )
        region = self._host.reserve(nbytes, cuts, purpose)
        if self._pinned:
            region = evolve(region, spans=self._cut(region, cuts), path="pinned")
        self.outstanding[region.address] = region
        self.given.append(region)
        return region

    def _cut(self, region: Region, cuts: Sequence[int]) -> tuple[Span, ...]:
        inside = sorted({c for c in cuts if 0 < c < region.nbytes})[:: self._spans_of]
        edges = [0, *inside, region.nbytes]
        return tuple(
            Span(
                region.address + begin,
                end - begin,
                region.address + begin + ALIAS_DISTANCE * (number + 1),
                pinned=True,
            )
            for number, (begin, end) in enumerate(pairwise(edges))
        )

    def release(self, region: Region) -> None:
        """Give a region back."""
        assert region.address in self.outstanding, (
            f"released twice, or never reserved: {region.purpose} at {region.address:#x}"
        )
        del self.outstanding[region.address]
        self._host.release(region)

    def close(self) -> None:
        """Give back whatever is left."""
        self.outstanding.clear()
        self._host.close()


class Silent:
    """Progress that nobody watches."""

    def start(self, label: str, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def done(self) -> None:
        """Nothing."""
