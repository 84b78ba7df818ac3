"""A launch that may begin before the one ahead of it ends: cuLaunchKernelEx, which CuPy lacks.

Source of names and numbers: the CUDA driver API's reference, CUlaunchConfig and
CUlaunchAttribute (6 is programmatic stream serialization, compute capability 9.0 and up).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

FIRST = 90
"""Compute capability from which on devices can, times ten."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("which", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint32 * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def early_config(shape: Sequence[int], stream: int) -> Any:
    """Where the configuration of an early launch is. `shape`: grid, block, shared bytes."""
    attribute = _Attribute(SERIALIZATION, b"", (ctypes.c_uint32 * 16)(1))
    three = ctypes.c_uint * 3
    grid, block = three(*shape[:3]), three(*shape[3:6])
    return ctypes.pointer(_Config(grid, block, shape[6], stream, ctypes.pointer(attribute), 1))
