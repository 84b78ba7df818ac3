"""Comparing bytes and values so that a difference is told in a line.

An `assert` on long byte strings makes pytest write the whole difference out wherever the variable
CI is set, which takes minutes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Bytes = bytes | bytearray | NDArray[np.uint8]


def same_bytes(have: Bytes, want: Bytes, wrong: str) -> None:
    """Raise AssertionError with `wrong` and the first difference, unless all bytes are equal."""
    mine, theirs = np.frombuffer(have, np.uint8), np.frombuffer(want, np.uint8)
    if mine.size != theirs.size:
        raise AssertionError(f"{wrong}: {mine.size} bytes, not {theirs.size}")
    differing = np.flatnonzero(mine != theirs)
    if differing.size:
        at = int(differing[0])
        raise AssertionError(
            f"{wrong}: {differing.size} of {mine.size} bytes differ, the first at byte {at}: "
            f"{mine[at]:#04x}, not {theirs[at]:#04x}"
        )


def same_values(have: Logits, want: Logits, wrong: str) -> None:
    """Raise AssertionError with `wrong` and the first position, unless all bits are equal."""
    if have.shape != want.shape:
        raise AssertionError(f"{wrong}: the shape is {have.shape}, not {want.shape}")
    differing = np.argwhere(have.view(np.uint32) != want.view(np.uint32))
    if differing.size:
        raise AssertionError(
            f"{wrong}: {len(differing)} of {have.size} values, "
            f"the first at position {int(differing[0][0])}"
        )
