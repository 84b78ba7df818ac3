"""The files of an unfinished pack: written at positions by several threads, then flushed."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from strata_core.errors import StrataError

_READ_WRITE = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Target:
    """A file of a known length that is written at positions. Any thread may write and read."""

    def __init__(self, path: Path, nbytes: int, *, fresh: bool) -> None:
        """Open or make the file; `fresh` drops what is in it. Raises StrataError."""
        self.path = path
        self._lock = threading.Lock()
        with _named(path):
            self._descriptor = os.open(path, _READ_WRITE, 0o666)
            try:
                if fresh:
                    os.ftruncate(self._descriptor, 0)
                os.ftruncate(self._descriptor, nbytes)
            except BaseException:
                os.close(self._descriptor)
                raise

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises StrataError naming file and offset."""
        done = 0
        with _named(self.path, offset):
            while done < len(data):
                wrote = self._write_at(data[done:], offset + done)
                if wrote <= 0:
                    raise OSError(errno.EIO, "the system wrote nothing")
                done += wrote

    def _write_at(self, data: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._descriptor, data, offset)
        with self._lock:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.write(self._descriptor, data)

    def flush(self) -> None:
        """Return when what was written is on the disk. Raises StrataError."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all. Raises StrataError."""
    beside = path.with_name(path.name + ".tmp")
    with Target(beside, len(content), fresh=True) as file:
        file.write(memoryview(content), 0)
        file.flush()
    with _named(path):
        beside.replace(path)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder last over a crash, where the system allows it."""
    if sys.platform == "win32":
        return
    with _named(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def taken(path: Path) -> int:
    """Bytes of the disk that a file takes now, 0 where there is none."""
    try:
        facts = path.stat()
    except OSError:
        return 0
    return int(getattr(facts, "st_blocks", 0)) * 512


class Unwritable(StrataError):
    """Something of a pack could not be written; `errno` is the system's number."""

    def __init__(self, what: str, why: str, number: int | None) -> None:
        super().__init__(what, why, _REMEDIES.get(number or 0, _REMEDY))
        self.errno = number


_REMEDY = "check the disk and the folder's permissions"
_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "name an OUT on a file system, and under a limit, that allow files of this size",
    errno.EROFS: "name an OUT on a disk that can be written",
}


class _named:  # noqa: N801 - used like a function
    """What the system refuses inside becomes an Unwritable that names the file."""

    def __init__(self, path: Path, offset: int | None = None) -> None:
        self._path = path
        self._where = "" if offset is None else f" at byte {offset}"

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            raise Unwritable(
                f"cannot write {self._path}{self._where}", f"the system says: {why}", error.errno
            ) from error
