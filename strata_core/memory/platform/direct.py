"""Files read past the system's file cache, behind one small interface.

Sources: open(2) (O_DIRECT: offset, length and memory aligned to the device's block, which 4 KiB
always is), posix_fadvise(2), macOS' fcntl(2) (F_NOCACHE).
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Protocol

BLOCK = 4096
"""Offsets, lengths and addresses of unbuffered reads are multiples of this."""

_F_NOCACHE = 48
"""macOS sys/fcntl.h: data is not kept in the system's cache."""

_REFUSALS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))
"""How file systems say that they have no unbuffered reads."""


class DirectFile(Protocol):
    """A file open for aligned reads. Any thread may read; reads release the interpreter's lock."""

    @property
    def refusal(self) -> str:
        """Why the file system's cache is used after all; "" where it is not."""

    def read(self, target: memoryview, offset: int) -> int:
        """Read up to `len(target)` bytes at `offset`; fewer at the file's end. Raises OSError.

        Offset, length and the target's address are multiples of BLOCK.
        """

    def size(self) -> int:
        """The file's length now. Raises OSError."""

    def close(self) -> None:
        """Close it; calling it again does nothing."""


def open_direct(path: Path) -> DirectFile:
    """Open a file for unbuffered reads, where its file system has them. Raises OSError."""
    if sys.platform == "win32":
        from strata_core.memory.platform.direct_windows import open_unbuffered

        return open_unbuffered(path)
    return PosixDirect.open(path)


class PosixDirect:
    """A descriptor; where unbuffered reads are refused, what was read leaves the cache again."""

    def __init__(self, descriptor: int, refusal: str = "") -> None:
        self._descriptor = descriptor
        self._refusal = refusal

    @classmethod
    def open(cls, path: Path) -> PosixDirect:
        """Open by O_DIRECT or F_NOCACHE, else buffered. Raises OSError."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        if sys.platform == "darwin":
            import fcntl

            descriptor = os.open(path, flags)
            try:
                fcntl.fcntl(descriptor, _F_NOCACHE, 1)
            except OSError as error:
                return cls(descriptor, str(error.strerror))
            return cls(descriptor)
        refusal = "this system has no O_DIRECT"
        if hasattr(os, "O_DIRECT"):
            try:
                return cls._proven(os.open(path, flags | os.O_DIRECT))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                refusal = f"its file system refuses O_DIRECT ({error.strerror})"
        return cls(os.open(path, flags), refusal)

    @classmethod
    def _proven(cls, descriptor: int) -> PosixDirect:
        """Some file systems refuse the first read, not the opening."""
        try:
            with mmap.mmap(-1, BLOCK) as page, memoryview(page) as target:
                os.preadv(descriptor, [target], 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def refusal(self) -> str:
        """Why reads are buffered."""
        return self._refusal

    def read(self, target: memoryview, offset: int) -> int:
        """By preadv(2)."""
        got = os.preadv(self._descriptor, [target], offset)
        if self._refusal and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)
        return got

    def size(self) -> int:
        """By fstat(2)."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
