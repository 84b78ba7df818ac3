"""Comparing host copies of experts with the files they come from (STRATA_TIER_VERIFY)."""

from __future__ import annotations

import threading

import numpy as np
from attrs import define, field

from strata_core.checkpoint.positioned import Reader
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, ExpertFiles
from strata_core.memory.address import bytes_at


@define(eq=False)
class CopyCheck:
    """Reads the file again, through the system's cache, and compares. Any thread may call it.

    `compared` copies were compared, `differ` of them differed.
    """

    _experts: ExpertFiles
    compared: int = 0
    differ: int = 0
    _reader: Reader = field(factory=Reader, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def check(self, expert: Expert, parts: tuple[int, int, int]) -> None:
        """Compare the bytes at three host addresses with the expert's gate, up and down.

        Raises StrataError naming expert, part and file where they differ or cannot be read.
        """
        wrong = None
        for piece, address in zip(self._experts.pieces(expert), parts, strict=True):
            stored = np.empty(piece.nbytes, np.uint8)
            self._reader.read(piece, stored.data, str(expert))
            if not np.array_equal(stored, bytes_at(address, piece.nbytes)):
                wrong = wrong or piece
        with self._lock:
            self.compared += 1
            self.differ += wrong is not None
        if wrong is not None:
            raise StrataError(
                f"the copy of {expert} in memory is not what its file holds",
                f"it differs from {wrong.file}, bytes {wrong.offset} to "
                f"{wrong.offset + wrong.nbytes}",
                "check memory and disk; was the file changed while it was in use?",
            )

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
