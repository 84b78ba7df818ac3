"""How a piece of memory is cut into slices, each of which is registered with a driver by itself.

Pure arithmetic. A slice is about one layer: it ends where a layer's first expert starts, moved up
to the next page, because a driver registers whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

MOST_SLICES = 512
"""Cuts that lie closer than this many slices would need are passed over."""


@frozen
class Slice:
    """Bytes `start` to `end` of a reservation; multiples of the page."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start


def make_slices(nbytes: int, cuts: Sequence[int], page: int) -> tuple[Slice, ...]:
    """Slices that cover `nbytes`, which is a multiple of the page, without holes.

    They end at `cuts` (offsets in any order), each moved up to a page.
    """
    least = -(-nbytes // MOST_SLICES)
    ends = {min(-(-cut // page) * page, nbytes) for cut in cuts if cut > 0} | {nbytes}
    slices: list[Slice] = []
    start = 0
    for end in sorted(ends):
        if end == nbytes or end - start >= least:
            slices.append(Slice(start, end))
            start = end
    return tuple(slice_ for slice_ in slices if slice_.nbytes)


def cut_off(
    slices: Sequence[Slice], most: int | None, page: int
) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """What of the slices lies below `most` bytes (None: all), and what does not.

    The slice in which the limit falls is cut there, at a page.
    """
    if most is None:
        return tuple(slices), ()
    limit = most // page * page
    below = [Slice(s.start, min(s.end, limit)) for s in slices if s.start < limit]
    above = [Slice(max(s.start, limit), s.end) for s in slices if s.end > limit]
    return tuple(below), tuple(above)
