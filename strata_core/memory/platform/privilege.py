"""The Windows privilege "Lock pages in memory", which large pages need.

Source: Microsoft, "Large-Page Support" and AdjustTokenPrivileges, which succeeds with the last
error 1300 where the account does not have the privilege.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

TOKEN_ADJUST_PRIVILEGES, TOKEN_QUERY = 0x20, 0x08
SE_PRIVILEGE_ENABLED = 0x02
NAME = "SeLockMemoryPrivilege"


class TokenPrivileges(ctypes.Structure):
    """TOKEN_PRIVILEGES of winnt.h for one privilege."""

    _fields_ = [
        ("count", ctypes.c_uint32),
        ("luid_low", ctypes.c_uint32),
        ("luid_high", ctypes.c_int32),
        ("attributes", ctypes.c_uint32),
    ]


def enable_lock_memory(kernel32: Any, advapi32: Any, last_error: Callable[[], int]) -> bool:
    """Switch the privilege on for this process; whether its account has it."""
    token = ctypes.c_void_p()
    access = ctypes.c_uint32(TOKEN_ADJUST_PRIVILEGES | TOKEN_QUERY)
    process = ctypes.c_void_p(kernel32.GetCurrentProcess())
    if not advapi32.OpenProcessToken(process, access, ctypes.byref(token)):
        return False
    try:
        wanted = TokenPrivileges(count=1, attributes=SE_PRIVILEGE_ENABLED)
        luid = ctypes.byref(wanted, TokenPrivileges.luid_low.offset)
        if not advapi32.LookupPrivilegeValueW(None, NAME, luid):
            return False
        done = advapi32.AdjustTokenPrivileges(
            token, ctypes.c_int(0), ctypes.byref(wanted), ctypes.c_uint32(0), None, None
        )
        return bool(done) and last_error() == 0
    finally:
        kernel32.CloseHandle(token)
