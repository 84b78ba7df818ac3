"""Memory that the simulator maps: committed when touched, guarded at its ends, dirty when new."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

from attrs import define

from strata_core.memory.address import bytes_at

PAGE = mmap.PAGESIZE
ALIGNMENT = 256
_GUARD = 64
_GUARD_BYTE = 0xC3
_DIRT = 0xFF  # as float32 not a number, as an index -1: an unwritten word does not look like data
_DIRTY_BYTES = 1 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def page_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@define(eq=False)
class Block:
    """A mapping of its own with `nbytes` usable at `address`; `before` bytes of guard precede it.

    The first MiB is filled with 0xFF, the rest is zero: nobody may count on contents.
    """

    address: int
    nbytes: int
    before: int
    mapping: mmap.mmap

    @classmethod
    def map(cls, nbytes: int, before: int) -> Block:
        """Map a block; OSError where the operating system refuses."""
        mapping = _map(page_up(before + nbytes + _GUARD))
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        block = cls(base + before, nbytes, before, mapping)
        bytes_at(block.address, min(nbytes, _DIRTY_BYTES))[:] = _DIRT
        block.mend()
        return block

    def mend(self) -> None:
        """Write the guards."""
        for start, length in self._guards():
            bytes_at(start, length)[:] = _GUARD_BYTE

    def intact(self) -> bool:
        """Whether nobody wrote into the guards."""
        return all(
            bool((bytes_at(start, length) == _GUARD_BYTE).all()) for start, length in self._guards()
        )

    def unmap(self) -> None:
        """Give the memory back to the operating system."""
        self.mapping.close()

    def _guards(self) -> list[tuple[int, int]]:
        ends = [(self.address + self.nbytes, _GUARD)]
        return ends + ([(self.address - self.before, self.before)] if self.before else [])


def _map(nbytes: int) -> mmap.mmap:
    """Anonymous private memory that is not set aside before it is written."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, nbytes, flags=flags | (_NO_RESERVE if sys.platform == "linux" else 0))


def mapped(address: int, nbytes: int) -> bool:
    """Whether every page of a range is mapped now; True where the system cannot be asked.

    mincore(2) fails with ENOMEM for a range that holds unmapped pages.
    """
    if sys.platform != "linux" or nbytes <= 0:
        return True
    start = address // PAGE * PAGE
    pages = (address + nbytes - start + PAGE - 1) // PAGE
    answer = (ctypes.c_ubyte * pages)()
    # Without argtypes an address would be passed as a 32-bit int.
    done = _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), answer)
    return bool(done == 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Mappings:
    """The process's mappings at one moment, from /proc/self/maps (proc(5)); all, without it."""

    def __init__(self) -> None:
        self._merged: list[list[int]] | None = None
        if sys.platform == "linux":
            self._merged = []
            for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
                start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                if self._merged and self._merged[-1][1] == start:
                    self._merged[-1][1] = end
                else:
                    self._merged.append([start, end])

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether the whole range was mapped."""
        if self._merged is None:
            return True
        return any(start <= address and address + nbytes <= end for start, end in self._merged)
