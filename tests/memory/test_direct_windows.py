"""Unbuffered reads on Windows, against a stand-in for kernel32 that keeps to its reference."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest

from strata_core.memory.platform.direct_windows import (
    ERROR_HANDLE_EOF,
    ERROR_INVALID_PARAMETER,
    FILE_FLAG_NO_BUFFERING,
    INVALID_HANDLE,
    Overlapped,
    WindowsDirect,
)

HIGH = 3 << 32


class Kernel32:
    """One file, whose content begins at HIGH: positions need both halves."""

    def __init__(self, content: bytes, *, buffered_only: bool = False, there: bool = True) -> None:
        self.content, self.buffered_only, self.there = content, buffered_only, there
        self.code, self.open, self.flags = 0, 0, 0

    def CreateFileW(self, path: Any, _access, _share, _security, _how, flags, _template):  # noqa: N802
        if not self.there:
            self.code = 2
            return INVALID_HANDLE
        if self.buffered_only and flags.value & FILE_FLAG_NO_BUFFERING:
            self.code = ERROR_INVALID_PARAMETER
            return INVALID_HANDLE
        assert path.value
        self.open, self.flags = self.open + 1, flags.value
        return 77

    def ReadFile(self, handle, address, length, got, position):  # noqa: N802
        assert handle.value == 77
        where = ctypes.cast(position, ctypes.POINTER(Overlapped)).contents
        offset = (where.offset_high << 32 | where.offset) - HIGH
        if self.flags & FILE_FLAG_NO_BUFFERING and (offset | length.value | address.value) % 4096:
            self.code = ERROR_INVALID_PARAMETER
            return 0
        data = self.content[offset : offset + length.value]
        if not data:
            self.code = ERROR_HANDLE_EOF
            return 0
        ctypes.memmove(address.value, data, len(data))
        ctypes.cast(got, ctypes.POINTER(ctypes.c_uint32))[0] = len(data)
        return 1

    def GetFileSizeEx(self, _handle, size):  # noqa: N802
        ctypes.cast(size, ctypes.POINTER(ctypes.c_int64))[0] = HIGH + len(self.content)
        return 1

    def CloseHandle(self, handle):  # noqa: N802
        assert handle.value == 77
        self.open -= 1
        return 1


def opened(kernel32: Kernel32) -> WindowsDirect:
    return WindowsDirect.open(Path("m.gguf"), kernel32, lambda: kernel32.code)


@pytest.mark.parametrize("buffered_only", [False, True])
def test_reads_give_the_files_bytes(buffered_only: bool) -> None:
    content = bytes(range(256)) * 24
    kernel32 = Kernel32(content, buffered_only=buffered_only)
    file = opened(kernel32)
    assert bool(file.refusal) == buffered_only
    assert file.size() == HIGH + len(content)
    with mmap.mmap(-1, 8192) as memory:
        target = memoryview(memory)
        assert file.read(target[:4096], HIGH) == 4096
        assert target[:4096] == content[:4096]
        assert file.read(target, HIGH + 4096) == len(content) - 4096
        assert target[: len(content) - 4096] == content[4096:]
        assert file.read(target, HIGH + 8192) == 0
        if not buffered_only:
            with pytest.raises(OSError, match="error 87"):
                file.read(target[:100], HIGH)
        target.release()
    file.close()
    file.close()
    assert kernel32.open == 0


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(OSError, match="error 2"):
        opened(Kernel32(b"", there=False))
