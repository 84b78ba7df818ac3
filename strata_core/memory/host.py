"""The plain allocator: pageable host memory, page-aligned, for backends without a device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from threading import Lock

from strata_core.errors import StrataError
from strata_core.interfaces import Allocator, AllocatorContext, Region, Span, StartPolicy


class HostAllocator:
    """Anonymous mappings, one a region; thread-safe. Memory is committed when it is written."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = Lock()

    @property
    def start_policy(self) -> StartPolicy:
        """No devices, nothing pinned: the plain order."""
        return StartPolicy()

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        """One span of zeroed pageable memory; `cuts` are not needed."""
        del cuts
        try:
            mapping = mmap.mmap(-1, max(nbytes, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise StrataError(
                f"cannot reserve {nbytes / 2**30:.2f} GiB of host memory for {purpose}",
                f"the operating system refused: {error}",
                "close other programs, or choose --source mmap",
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self._lock:
            self._maps[address] = mapping
        span = Span(address, nbytes)
        return Region(address, nbytes, (span,), "pageable", "no device to pin for", purpose)

    def release(self, region: Region) -> None:
        """Unmap a region."""
        with self._lock:
            mapping = self._maps.pop(region.address)
        mapping.close()

    def close(self) -> None:
        """Unmap whatever is left."""
        with self._lock:
            mappings, self._maps = list(self._maps.values()), {}
        for mapping in mappings:
            mapping.close()


def build(context: AllocatorContext) -> Allocator:
    """The allocator of the record `host`."""
    del context
    return HostAllocator()
