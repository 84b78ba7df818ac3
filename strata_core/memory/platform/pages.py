"""Telling the system which pages of a mapped file will be read: madvise(2), where there is one."""

from __future__ import annotations

import ctypes
import mmap
import sys

from attrs import frozen


@frozen
class PageHints:
    """The system's call `int advise(void *, size_t, int)` by its address, and two advices for it.

    `random`: pages are read one by one, not with their neighbours; `will_need`: begin to read them.
    """

    function: int
    random: int
    will_need: int

    def advise(self, address: int, nbytes: int, advice: int) -> None:
        """Advise on the pages that hold a range; a refusal changes nothing but the speed."""
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        kind(self.function)(start, address + nbytes - start, advice)


def page_hints() -> PageHints | None:
    """This system's; None where it has none that compiled code could give."""
    if sys.platform == "win32":
        return None
    function = ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value
    if not function:
        return None
    return PageHints(function, mmap.MADV_RANDOM, mmap.MADV_WILLNEED)
