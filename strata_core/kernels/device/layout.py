"""What device kernels and the host agree on, byte by byte: entries, cells, lanes, records, places.

An *entry* is one (token, router position) of a window. `assign` fills one `ENTRY` for each; the
kernels of the experts and `combine` read nothing else. A *cell* says where a device finds one
expert of a layer; cells change between rounds only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

MOST_TOKENS = 8
"""Tokens of the largest window that the kernels must take; longer windows are run in pieces."""

Lane = Literal["hit", "pcie", "cpu", "helper"]

HIT, LINK, HOST, HELPER = 0, 1, 2, 3
"""Lane numbers: from a slot; over the link through an alias; by the CPU; HELPER + h - 1 by the
helper on device h (1 to 3)."""

LANES = HELPER + 3
"""Number of lanes."""

ENTRY = np.dtype(
    [
        ("gate", "<u8"),
        ("up", "<u8"),
        ("down", "<u8"),
        ("row", "<u8"),
        ("expert", "<i4"),
        ("lane", "<i4"),
        ("first", "<i4"),
        ("unused", "<i4"),
    ]
)
"""One entry, 48 bytes. `gate`, `up`, `down`: addresses of the expert's matrices for this device; 0
where another lane computes the entry. `row`: address of the entry's result, float32 [width]: in
device memory, or (lanes of others) through the alias of page-locked host rows. `first`: number of
the first entry of the window with the same expert (its own if it is that one), so that a kernel can
read an expert once for all its tokens."""

CELL = np.dtype(
    [("slot", "<u8", (3,)), ("alias", "<u8", (3,)), ("helper", "<i4"), ("unused", "<i4", (3,))]
)
"""One expert of a layer, 64 bytes. `slot`: addresses of gate, up and down in this device's memory;
`alias`: in host memory as this device addresses it; zeros where it is not there. `helper`: the
device (1 to 3) whose cache holds it, or 0."""

WAVE = np.dtype(
    [("gate", "<u8"), ("up", "<u8"), ("down", "<u8"), ("expert", "<i4"), ("unused", "<i4")]
)
"""One expert of a wave of a prompt's layer, 32 bytes: addresses of its matrices in this device's
memory, and its index. The waves of a layer follow each other in one table."""

PLACE_FIELDS = ("k", "v", "k_scales", "v_scales")
"""uint64 fields of a token's place: addresses of its sequence's keys and values, [layers, context,
width] in the KV type, and for int8 of their half scales, [layers, context, width / 32]."""

STATUS_BYTES = 256
"""Bytes kept for the status word (uint32), so that what follows it stays aligned. The word starts
as 0xFFFFFFFF; a kernel that meets a value that is not finite takes the minimum with its op's
number."""

LATE = 64
"""Where in STATUS_BYTES the latch of waits is (uint32): 0xFFFFFFFF, or the place among the routed
layers of the first one whose answer did not come in time."""

PARTIAL_HEAD = 8
"""Floats before the weighted sum in a partial of attention; the first two are m and l."""

LINE_BYTES = 128
"""Bytes of a line of device memory: what weights are asked for ahead by."""

RECORD_BYTES = 576
"""Bytes of the record of 256 quantised activations: 2 planes of 256 bytes (or int16 [256]), 8
float32 scales, 8 int32 sums. The order within a record is the kernel set's own."""


def record_bytes(columns: int) -> int:
    """Bytes of a row of `columns` quantised activations. The buffer starts as zeros."""
    return -(-columns // 256) * RECORD_BYTES


def inner_bytes(columns: int) -> int:
    """Bytes of an entry's inner activations, as records or as float32: the kernel set's choice."""
    return -(-columns // 256) * 1024
