"""A file mapped read-only, and small files read whole; every failure names the file."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from strata_core.errors import CheckpointError

SMALL_FILE_LIMIT = 1 << 28
"""Most bytes of a file that is read whole (256 MiB; real tokenizers stay below 40 MiB)."""

JSON_LIMIT = 1 << 24
"""Most bytes of a JSON file that becomes Python objects, which may take thirty times as much (16
MiB; real configurations stay below 4 MiB)."""


@frozen(eq=False)
class MappedFile:
    """One mapped file: `data` is a read-only uint8 array over its bytes, `view` the same memory.

    The mapping lives as long as any view of it. A file that another program truncates while
    it is mapped ends this process with a bus error where a lost byte is read, as with every mapped
    file; `whole` looks for that before each round.
    """

    path: Path
    view: memoryview
    data: np.ndarray

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return int(self.data.size)


def map_file(path: Path) -> MappedFile:
    """Map a regular file read-only; nothing is read yet. Raises CheckpointError.

    The descriptor is closed before this returns; an empty file is refused, for it cannot be mapped
    and holds no model.
    """
    try:
        # O_NONBLOCK: opening a pipe must be refused below, not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise not_a_file(path)
        if facts.st_size == 0:
            raise CheckpointError(
                f"{path} is empty", "the file holds 0 bytes", "download or convert the model again"
            )
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return MappedFile(path, memoryview(mapping), np.frombuffer(mapping, dtype=np.uint8))


_BINARY = getattr(os, "O_BINARY", 0)


def exists(path: Path) -> bool:
    """Whether something is there. Raises CheckpointError where the system does not say."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes. Raises CheckpointError."""
    data = read_small(path, limit)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON",
            _one_line(error) or type(error).__name__,
            "the file is damaged; download it again",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} does not hold a JSON object",
            f"its top level is a {type(value).__name__}",
            "the file is damaged; download it again",
        )
    return value


def read_small(path: Path, limit: int = SMALL_FILE_LIMIT) -> bytes:
    """All bytes of a regular file of at most `limit` bytes. Raises CheckpointError."""
    mapped = map_file(path)
    if mapped.size > limit:
        raise CheckpointError(
            f"{path} is too large",
            f"it holds {mapped.size} bytes, the most expected here is {limit}",
            "this is not the file that its name says; download it again",
        )
    return mapped.view.tobytes()


def not_a_file(path: Path) -> CheckpointError:
    """The error for a path that is a folder, a pipe or a device where a file was expected."""
    return CheckpointError(
        f"{path} is not a regular file",
        "models are mapped into memory, which only regular files allow",
        "name a .gguf file or a folder with config.json and safetensors files",
    )


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a path that the system refuses to open or map."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or _one_line(error)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointError(f"{path} does not exist", reason, "check the path of the model")
    if number in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"{path} may not be read", reason, "change the file's permissions")
    return CheckpointError(f"{path} cannot be opened", reason, "check the path of the model")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
