"""Arrays over raw addresses: the one place where an integer becomes memory."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def bytes_at(address: int, nbytes: int) -> Bytes:
    """A uint8 array over `nbytes` at `address`; the caller keeps that memory alive and mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def address_of(array: Bytes) -> int:
    """The address of an array's first byte."""
    return int(array.ctypes.data)
