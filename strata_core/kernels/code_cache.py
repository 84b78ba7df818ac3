"""Compiled code on disk, under names that are hashes of all that decides what it is.

Entries are written to a temporary name and renamed, so readers see whole files; a damaged one is
noticed by its checksum and made again. Nothing is ever removed or replaced by other contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata_core.config import cache_folder
from strata_core.errors import Degradation

DIGEST = hashlib.sha256


class CodeCache:
    """A folder of compiled code; None is no cache. Any process may use the folder at any time.

    One that cannot be read or written is reported once to `degrade`; then nothing is kept.
    """

    def __init__(self, folder: Path | None, degrade: Callable[[Degradation], None]) -> None:
        self._folder = folder
        self._degrade = degrade

    @staticmethod
    def key(*parts: str) -> str:
        """The name of what `parts` decide."""
        return DIGEST("\0".join(parts).encode()).hexdigest()[:40]

    def read(self, key: str) -> bytes | None:
        """The code of that name; None where there is none, or a damaged one."""
        if self._folder is None:
            return None
        try:
            data = (self._folder / f"{key}.o").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        size = DIGEST().digest_size
        digest, body = data[:size], data[size:]
        return body if DIGEST(body).digest() == digest else None

    def write(self, key: str, code: bytes) -> None:
        """Keep code under a name."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(DIGEST(code).digest() + code)
                Path(temporary).replace(self._folder / f"{key}.o")
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


def kernel_folder(options: Mapping[str, Any]) -> Path | None:
    """The folder of compiled kernels: in the setting `cache_dir`, else in the user's caches."""
    named = options.get("cache_dir")
    folder = Path(named) if named else cache_folder()
    return folder / "kernels" if folder else None


def open_cache(options: Mapping[str, Any], degrade: Callable[[Degradation], None]) -> CodeCache:
    """The cache of compiled kernels that settings name."""
    return CodeCache(kernel_folder(options), degrade)
