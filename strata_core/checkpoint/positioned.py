"""Reading ranges of files into memory, from any thread; a failure names what was wanted and where.

Reading, unlike a mapping, leaves nothing in this process's memory, and a file that shrinks or a
disk that fails is an error here instead of the end of the process.
"""

from __future__ import annotations

import os
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from attrs import define, field

from strata_core.errors import StrataError
from strata_core.interfaces import Piece


@define(eq=False)
class Reader:
    """Files opened once each and kept open until `close`. Any thread may read."""

    _files: dict[Path, FileIO] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def read(self, piece: Piece, target: memoryview, what: str) -> None:
        """Fill `target` (as long as the piece) with the piece's bytes.

        `what` names the thing read, e.g. an expert. Raises StrataError naming it, file and range;
        the content of `target` is undefined then.
        """
        try:
            file = self._open(piece.file)
            done = 0
            while done < piece.nbytes:
                got = self._read_at(file, target[done:], piece.offset + done)
                if not got:
                    raise OSError(f"the file ends at byte {os.fstat(file.fileno()).st_size}")
                done += got
        except OSError as error:
            raise StrataError(
                f"cannot read {what} from {piece.file}",
                f"bytes {piece.offset} to {piece.offset + piece.nbytes}: {error}",
                "check that the file is complete and was not changed while it was in use",
            ) from error

    def _open(self, path: Path) -> FileIO:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = FileIO(path, "r")
            return file

    def _read_at(self, file: FileIO, target: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [target], offset)
        with self._lock:
            file.seek(offset)
            return file.readinto(target)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
