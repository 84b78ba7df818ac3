"""Parts of a blob that follow each other in memory as in the blob go by one copy."""

from __future__ import annotations

from collections.abc import Sequence

from strata_core.interfaces import BlobLayout


def runs(layout: BlobLayout, parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(offset within the blob, address, bytes) of each copy; `parts` are addresses in memory.

    Nothing between parts is copied: it may be another's. Those that follow each other lie in one
    page-locked piece (`View.dma`): no copy goes across two.
    """
    found: list[tuple[int, int, int]] = []
    for part, address in zip(layout.parts, parts, strict=True):
        if found:
            offset, start, nbytes = found[-1]
            if (offset + nbytes, start + nbytes) == (part.offset, address):
                found[-1] = offset, start, nbytes + part.nbytes
                continue
        found.append((part.offset, address, part.nbytes))
    return found
