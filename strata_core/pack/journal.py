"""What an unfinished pack has of itself: a journal of the units that are on the disk.

A line is one JSON object. The first says what is packed, so that another model never goes on where
this one stopped; each later one names a unit and the hashes of its items, and is written only when
their bytes are flushed. A line that a crash cut short does not count, nor does any after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from strata_core.errors import StrataError, UsageError


class Journal:
    """The journal of one folder, locked for this process from `open` to `close`.

    One thread uses it. `done` holds the hashes by unit; the system drops the lock of a process
    that ends in whatever way.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self.path = path
        self.done: dict[str, tuple[str, ...]] = {}

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> Self:
        """Open and lock the journal at `path`, making it where there is none.

        Where it is about another `identity`, or about none, it is emptied and `done` is too.
        Raises UsageError where another process holds it, OSError.
        """
        file = path.open("a+b")
        try:
            lock(file, path)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise in_use(path)
            journal = cls(file, path)
            journal._begin(identity)
        except BaseException:
            file.close()
            raise
        return journal

    def _begin(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        valid = 0
        head = False
        for line in self._file:
            entry = _entry(line)
            if entry is None or (not head and entry != identity):
                break
            if head and not self._take(entry):
                break
            head = True
            valid += len(line)
        self._file.truncate(valid)
        if not head:
            self._append(identity)

    def _take(self, entry: dict[str, Any]) -> bool:
        unit, hashes = entry.get("unit"), entry.get("hashes")
        if not isinstance(unit, str) or not isinstance(hashes, list):
            return False
        self.done[unit] = tuple(map(str, hashes))
        return True

    def add(self, unit: str, hashes: tuple[str, ...]) -> None:
        """Note that a unit's bytes are on the disk. Raises OSError."""
        self._append({"unit": unit, "hashes": list(hashes)})
        self.done[unit] = hashes

    def forget(self, unit: str) -> None:
        """Do not count a unit as done in this run; a later line about it takes its place."""
        self.done.pop(unit, None)

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Give the lock back; the file stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _entry(line: bytes) -> dict[str, Any] | None:
    """A whole line's object; None for a line cut short or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def lock(file: IO[bytes], path: Path) -> None:
    """Lock an open file for this process. Raises UsageError where another one has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise in_use(path) from error


def in_use(path: Path) -> StrataError:
    """The error for a folder that another process is packing into."""
    return UsageError(
        f"{path.parent} is being written",
        "another `strata pack` works on the same OUT",
        "wait until it has ended, or name another OUT",
    )
