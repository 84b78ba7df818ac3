"""Whether mapped files still hold what is read of them; asked before each round.

A file that another program cuts short while it is mapped ends this process with a bus error as soon
as a lost byte is read. Looking at its length first turns that into an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from strata_core.errors import CheckpointError, Degradation

AT_ONCE = 8
"""Files looked at before a round; of more than these, others in each round."""


@frozen
class Need:
    """Bytes of a mapped file that are read: up to `end`; `what` is what ends last there."""

    end: int
    what: str


def _unwatched(path: Path, error: OSError) -> Degradation:
    return Degradation(
        what=f"{path} is not watched while it is in use",
        why=f"it cannot be opened once more: {error.strerror or error}",
        cost="cutting it short would end this process, where else a request fails",
        remedy="leave the file as it is while the model is loaded, or load the model again",
    )


@define(eq=False)
class WholeFiles:
    """Files that are mapped, each open to ask for its length. One thread at a time.

    A file that was removed or replaced is still the one that is mapped, and stays whole.
    """

    _needs: Mapping[Path, Need]
    _open: list[tuple[int, Path]] = field(factory=list)
    _next: int = 0

    @classmethod
    def open(cls, needs: Mapping[Path, Need], degrade: Callable[[Degradation], None]) -> WholeFiles:
        """Watch these files. One that cannot be opened any more is reported, and not watched."""
        found = cls(dict(needs))
        for path in needs:
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                degrade(_unwatched(path, error))
            else:
                found._open.append((descriptor, path))
        return found

    def check(self) -> None:
        """Raise CheckpointError where a file is shorter than what is read of it."""
        count = len(self._open)
        for _ in range(min(count, AT_ONCE)):
            descriptor, path = self._open[self._next]
            self._next = (self._next + 1) % count
            size = os.fstat(descriptor).st_size
            need = self._needs[path]
            if size < need.end:
                raise CheckpointError(
                    f"{path} was cut short while it is in use",
                    f"it ends at byte {size}, and {need.what} ends at byte {need.end}",
                    "put the file back as it was, or load the model again",
                )

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        while self._open:
            os.close(self._open.pop()[0])
