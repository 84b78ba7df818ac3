"""Files read past the system's file cache on Windows.

Sources: Microsoft's reference of CreateFileW, ReadFile with an OVERLAPPED position on a handle that
is opened for synchronous reads, GetFileSizeEx, and "File Buffering" (offset, length and address are
multiples of the volume's sector, which 4 KiB always is).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata_core.memory.address import address_of

GENERIC_READ = 0x80000000
SHARE_ALL = 0x7  # others may read, write and delete: a model may be moved away while it serves
OPEN_EXISTING = 3
FILE_FLAG_NO_BUFFERING = 0x20000000
INVALID_HANDLE = ctypes.c_void_p(-1).value
ERROR_HANDLE_EOF = 38
ERROR_INVALID_PARAMETER = 87


class Overlapped(ctypes.Structure):
    """OVERLAPPED: here only the position to read from."""

    _fields_ = (
        ("internal", ctypes.c_void_p),
        ("internal_high", ctypes.c_void_p),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


class WindowsDirect:
    """A handle; see `direct.DirectFile`. `last_error` is the calling thread's last error code."""

    def __init__(
        self, kernel32: Any, last_error: Callable[[], int], handle: int, refusal: str = ""
    ) -> None:
        self._kernel32, self._last_error = kernel32, last_error
        self._handle: int | None = handle
        self._refusal = refusal

    @classmethod
    def open(cls, path: Path, kernel32: Any, last_error: Callable[[], int]) -> WindowsDirect:
        """Open unbuffered, or buffered where the volume refuses that. Raises OSError."""
        for flags, refusal in (
            (FILE_FLAG_NO_BUFFERING, ""),
            (0, "its volume refuses FILE_FLAG_NO_BUFFERING"),
        ):
            handle = kernel32.CreateFileW(
                ctypes.c_wchar_p(str(path)),
                ctypes.c_uint32(GENERIC_READ),
                ctypes.c_uint32(SHARE_ALL),
                None,
                ctypes.c_uint32(OPEN_EXISTING),
                ctypes.c_uint32(flags),
                None,
            )
            if handle not in (None, INVALID_HANDLE):
                return cls(kernel32, last_error, handle, refusal)
            code = last_error()
            if code != ERROR_INVALID_PARAMETER:
                break
        raise OSError(0, f"Windows error {code}", str(path), code)

    @property
    def refusal(self) -> str:
        """Why reads are buffered."""
        return self._refusal

    def read(self, target: memoryview, offset: int) -> int:
        """By ReadFile; ctypes releases the interpreter's lock."""
        position = Overlapped(offset=offset & 0xFFFFFFFF, offset_high=offset >> 32)
        got = ctypes.c_uint32()
        if not self._kernel32.ReadFile(
            ctypes.c_void_p(self._handle),
            ctypes.c_void_p(address_of(np.frombuffer(target, np.uint8))),
            ctypes.c_uint32(len(target)),
            ctypes.byref(got),
            ctypes.byref(position),
        ):
            code = self._last_error()
            if code != ERROR_HANDLE_EOF:
                raise OSError(0, f"ReadFile: Windows error {code}")
        return int(got.value)

    def size(self) -> int:
        """By GetFileSizeEx."""
        nbytes = ctypes.c_int64()
        if not self._kernel32.GetFileSizeEx(ctypes.c_void_p(self._handle), ctypes.byref(nbytes)):
            raise OSError(0, f"GetFileSizeEx: Windows error {self._last_error()}")
        return nbytes.value

    def close(self) -> None:
        """Close the handle."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._kernel32.CloseHandle(ctypes.c_void_p(handle))
