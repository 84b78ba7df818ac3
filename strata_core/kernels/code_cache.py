"""A folder of compiled kernels: what was compiled once is read at the next start.

The name of an entry is a hash of everything that decides what it holds, so an entry never goes
stale. Entries are written to a temporary name and renamed, so readers see whole files; a damaged
one is noticed by its checksum and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from strata_core.errors import Degradation

Report = Callable[[Degradation], None]


def key_of(*parts: str) -> str:
    """The name of an entry, from all that decides what it holds."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


class CodeCache:
    """Entries by key; `folder` None keeps nothing. Threads and processes may share a folder.

    A folder that cannot be read or written is reported once to `degrade`; everything still works.
    """

    def __init__(self, folder: Path | None, degrade: Report, suffix: str = ".o") -> None:
        self._folder = folder
        self._degrade = degrade
        self._suffix = suffix

    def read(self, key: str) -> bytes | None:
        """What was written under a key; None where nothing sound is there."""
        if self._folder is None:
            return None
        try:
            data = (self._folder / f"{key}{self._suffix}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        digest, body = data[:32], data[32:]
        return body if hashlib.sha256(body).digest() == digest else None

    def write(self, key: str, body: bytes) -> None:
        """Keep `body` under a key."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).digest() + body)
                Path(temporary).replace(self._folder / f"{key}{self._suffix}")
            except OSError:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._degrade(
            Degradation(
                what="compiled kernels are not kept",
                why=f"the cache folder {self._folder} cannot be used: {error.strerror or error}",
                cost="every start compiles them again, which takes some seconds",
                remedy="make the folder writable, or set another one with STRATA_CACHE_DIR",
            )
        )
        self._folder = None
