"""The table of device kernels: name, parameters, typed arguments, grid rule, and what is computed.

A device program launches these by name. A GPU runtime compiles the source of that name; the
simulated accelerator calls the host function of that name on the same argument block. Bits are
those of docs/arithmetic.md, the same as the compiled CPU steps'.

Argument block: arguments in the order of the table, each at its natural alignment, little-endian,
no padding at the end. Kinds: `ptr` (uint64 device address), `i32`, `i64`, `f32`.

Buffers are contiguous float32 [rows, width] unless said. What differs between the rounds of one
graph (ids, positions, places, cells, the round's number) is read from memory, so a graph replays at
any position; what shapes the work (rows, widths, splits) is an argument.

The grid rules belong to the sources of the kernels: who changes how a kernel divides its work
changes the rule here.
"""

from __future__ import annotations

import struct

from strata_core.kernels.device.entry import (
    WAIT_ARGS,
    DeviceKernel,
    Geometry,
    Values,
    each,
    embedded,
    one,
    over,
    slot_bytes,
    staged,
)
from strata_core.kernels.device.fused_table import FUSED
from strata_core.kernels.device.prompt_table import PROMPT_KERNELS
from strata_core.runtime import KernelKey, Launch


def _table(*entries: DeviceKernel) -> dict[str, DeviceKernel]:
    return {k.name: k for k in entries}


MOST_STAGED = 100 << 10
"""Bytes of shared memory beyond which a block of `gate_up` would have its processor for itself."""

INNER_PER_BLOCK = 32
"""Rows of gate and up of one block of `gate_up`: one block of inner activations."""


def gate_up_warps(gate_stride: int, up_stride: int, room: int) -> int:
    """Warps that stage four rows of gate and of up each in `room` bytes of shared memory.

    8, 4 or 2; 0: rows are read where they are, by 8 warps.
    """
    each = slot_bytes(gate_stride, 4) + slot_bytes(up_stride, 4)
    return next((n for n in (8, 4, 2) if n * each <= min(room, MOST_STAGED)), 0)


def _gate_up(a: Values) -> Geometry:
    warps = int(a["warps"])
    each = slot_bytes(int(a["gate_stride"]), 4) + slot_bytes(int(a["up_stride"]), 4)
    grid = (-(-int(a["rows"]) // INNER_PER_BLOCK), int(a["count"]), 1)
    return Geometry(grid, (32 * (warps or 8), 1, 1), warps * each)


ENOUGH_BLOCKS = 264
"""Blocks that fill a large device; with more of them, heads that share keys share a block."""


def _attention(a: Values) -> Geometry:
    splits, tokens, group = int(a["splits"]), int(a["tokens"]), int(a["group"])
    per = 8
    while per > 1 and int(a["kv_heads"]) * -(-group // per) * splits * tokens < ENOUGH_BLOCKS:
        per //= 2
    return Geometry((splits, int(a["kv_heads"]) * -(-group // per), tokens), (256, 1, 1))


DEVICE_KERNELS: dict[str, DeviceKernel] = _table(
    DeviceKernel(
        name="embed",
        parameters=("type",),
        args={
            "ids": "ptr",
            "table": "ptr",
            "out": "ptr",
            "stride": "i64",
            "tokens": "i32",
            "width": "i32",
        },
        geometry=embedded,
        summary="row ids[t] of the table as float32 (docs/arithmetic.md, 3.3); `stride`: bytes of "
        "a table row; the table may lie in host memory",
    ),
    DeviceKernel(
        name="rms_norm",
        args={
            "x": "ptr",
            "out": "ptr",
            "weight": "ptr",
            "rows": "i32",
            "runs": "i32",
            "dim": "i32",
            "eps": "f32",
        },
        geometry=each("runs", "rows", threads=128),
        summary="each of a row's `runs` runs of `dim` floats; weight float32 [dim]; out may be x",
    ),
    DeviceKernel(
        name="quantise",
        args={
            "x": "ptr",
            "records": "ptr",
            "status": "ptr",
            "rows": "i32",
            "width": "i32",
            "op": "i32",
        },
        geometry=over("width", 1024, "rows"),
        summary="float rows to records, record_bytes(width) apart; width is a multiple of 32; what "
        "lies beyond the row in its last record stays as it is; x may lie in host memory",
    ),
    DeviceKernel(
        name="linear",
        parameters=("type",),
        args={
            "weight": "ptr",
            "x": "ptr",
            "out": "ptr",
            "bias": "ptr",
            "stride": "i64",
            "tokens": "i32",
            "rows": "i32",
            "columns": "i32",
        },
        geometry=staged({"rows": "stride"}),
        summary="out[t, r] = weight row r times x row t, plus bias[r] unless bias is 0; x: records "
        "for quantised types, else float rows; `stride`: bytes of a weight row",
    ),
    DeviceKernel(
        name="rope",
        args={
            "x": "ptr",
            "cos": "ptr",
            "sin": "ptr",
            "tokens": "i32",
            "heads": "i32",
            "head_dim": "i32",
            "half": "i32",
        },
        geometry=each("heads", "tokens", threads=64),
        summary="pairs (i, i + half) of each head by line t of the tables, float32 [tokens, half]",
    ),
    DeviceKernel(
        name="kv_append",
        parameters=("kv",),
        args={
            "k": "ptr",
            "v": "ptr",
            "positions": "ptr",
            "places": "ptr",
            "status": "ptr",
            "layer_offset": "i64",
            "tokens": "i32",
            "width": "i32",
            "op": "i32",
        },
        geometry=over("width", 256, "tokens"),
        summary="rows of k and v in the KV type to row layer_offset + position of their token's "
        "place; `places`: uint64 [tokens, PLACE_FIELDS]",
    ),
    DeviceKernel(
        name="attention",
        parameters=("kv", "head_dim"),
        args={
            "q": "ptr",
            "partials": "ptr",
            "positions": "ptr",
            "places": "ptr",
            "ahead": "ptr",
            "layer_offset": "i64",
            "tokens": "i32",
            "width": "i32",
            "kv_heads": "i32",
            "group": "i32",
            "window": "i32",
            "splits": "i32",
            "ahead_lines": "i32",
        },
        geometry=_attention,
        summary="partials, float32 [tokens, heads, splits, PARTIAL_HEAD + head_dim]; split number "
        "0 of a token is the one of 256 absolute positions that holds its first position; a split "
        "past its position is not written; `group`: heads that share a KV head; `window`: "
        "positions seen, 0 for all; `ahead`: weights that may be asked for meanwhile, so many "
        "lines of 128 bytes",
    ),
    DeviceKernel(
        name="merge",
        parameters=("head_dim",),
        args={
            "out": "ptr",
            "partials": "ptr",
            "positions": "ptr",
            "tokens": "i32",
            "heads": "i32",
            "window": "i32",
            "splits": "i32",
        },
        geometry=each("heads", "tokens", threads=128),
        summary="each head's partials folded, ascending, and divided",
    ),
    DeviceKernel(
        name="add",
        args={"x": "ptr", "y": "ptr", "rows": "i32", "width": "i32"},
        geometry=over("width", 256, "rows"),
        summary="x = x + y",
    ),
    DeviceKernel(
        name="silu_mul",
        args={"gate": "ptr", "up": "ptr", "out": "ptr", "rows": "i32", "width": "i32"},
        geometry=over("width", 256, "rows"),
        summary="out = silu(gate) * up; out may be gate",
    ),
    DeviceKernel(
        name="gate_add",
        args={"x": "ptr", "y": "ptr", "gate": "ptr", "rows": "i32", "width": "i32"},
        geometry=over("width", 256, "rows"),
        summary="x = fma(sigmoid(gate[row]), y, x)",
    ),
    DeviceKernel(
        name="route",
        args={
            "logits": "ptr",
            "picks": "ptr",
            "weights": "ptr",
            "status": "ptr",
            "tokens": "i32",
            "experts": "i32",
            "top_k": "i32",
            "renormalise": "i32",
            "op": "i32",
        },
        geometry=each("tokens", threads=128),
        summary="int32 picks and float32 weights, [tokens, top_k]; ties go to the lowest index",
    ),
    DeviceKernel(
        name="assign",
        args={
            "picks": "ptr",
            "cells": "ptr",
            "share": "ptr",
            "x": "ptr",
            "entries": "ptr",
            "rows": "ptr",
            "host_rows": "ptr",
            "counts": "ptr",
            "mail_x": "ptr",
            "mail_picks": "ptr",
            "mail_lanes": "ptr",
            "mail_host": "ptr",
            "mail_word": "ptr",
            "round": "ptr",
            "tokens": "i32",
            "top_k": "i32",
            "inputs": "i32",
            "outputs": "i32",
        },
        geometry=one(1024),
        summary="The one place where lanes are chosen. Entries in order; `cells`: CELL [experts]. "
        "An expert in a slot is a hit; else one with a helper goes there; the rest are misses, m "
        "different experts: of them the first share[m] (int32) that have an alias, in order of "
        "first appearance, go over the link, the others to the CPU. All entries of an expert take "
        "one lane. Entry i's row is rows + i * outputs * 4 for hits and the link, else host_rows + "
        "i * outputs * 4. counts: uint64 [LANES], entries of each lane added. Published: picks "
        "(int32 [entries]) where mail_picks is not 0; where mail_word is not either, x (float32 "
        "[tokens, inputs]), lanes (int32 [entries]), mail_host (int32 [entries]: the pick where "
        "the CPU computes it, else -1); then, behind a system fence, *mail_word = *round (int64)",
    ),
    DeviceKernel(
        name="claim",
        args={
            "mail_picks": "ptr",
            "mail_lanes": "ptr",
            "cells": "ptr",
            "entries": "ptr",
            "host_rows": "ptr",
            "count": "i32",
            "lane": "i32",
            "outputs": "i32",
        },
        geometry=one(256),
        summary="A helper's part of `assign`: entries of its lane get their slot's addresses and "
        "row host_rows + i * outputs * 4; the addresses of all others are 0; `first` is as in "
        "`assign`",
    ),
    DeviceKernel(
        name="gate_up",
        parameters=("gate", "up", "down"),
        args={
            "entries": "ptr",
            "x": "ptr",
            "inner": "ptr",
            "status": "ptr",
            "gate_stride": "i64",
            "up_stride": "i64",
            "count": "i32",
            "top_k": "i32",
            "rows": "i32",
            "columns": "i32",
            "op": "i32",
            "warps": "i32",
        },
        geometry=_gate_up,
        summary="silu(gate x) * (up x) of each of `count` entries with addresses; entry i's input "
        "is row i / top_k of x (records where gate and up are quantised, else floats); inner rows "
        "are inner_bytes(rows) apart and hold what `down` of that type wants; rows is a multiple "
        "of 32; strides: bytes of a weight row; `warps`: how many of a block stage rows, see "
        "`gate_up_warps`",
    ),
    DeviceKernel(
        name="down",
        parameters=("type",),
        args={
            "entries": "ptr",
            "inner": "ptr",
            "stride": "i64",
            "count": "i32",
            "rows": "i32",
            "columns": "i32",
        },
        geometry=staged({"rows": "stride"}, "count"),
        summary="each entry's unweighted result to its `row`; inner rows are inner_bytes(columns) "
        "apart",
    ),
    DeviceKernel(
        name="combine",
        args={
            "x": "ptr",
            "entries": "ptr",
            "weights": "ptr",
            **WAIT_ARGS,
            "tokens": "i32",
            "width": "i32",
            "top_k": "i32",
        },
        geometry=over("width", 256, "tokens"),
        summary="x + (the weighted rows of the token's entries, by fma from +0 in router order); "
        "waits for the host first, unless answer is 0",
    ),
    DeviceKernel(
        name="gather",
        args={"x": "ptr", "index": "ptr", "out": "ptr", "rows": "i32", "width": "i32"},
        geometry=over("width", 256, "rows"),
        summary="row index[i] of x becomes row i of out",
    ),
    DeviceKernel(
        name="signal",
        args={"word": "ptr", "value": "ptr"},
        geometry=one(1),
        summary="*word = *value (int64) behind a system fence; word lies in host memory",
    ),
    *(fused.kernel for fused in FUSED.values()),
    *PROMPT_KERNELS,
)
"""Every device kernel by name, the fused ones too."""

_BLOCKS = {name: struct.Struct(kernel.format) for name, kernel in DEVICE_KERNELS.items()}


def pack(name: str, **values: float) -> bytes:
    """The argument block of a kernel. Raises ValueError unless exactly its arguments are given."""
    kernel = DEVICE_KERNELS[name]
    if values.keys() != kernel.args.keys():
        raise ValueError(f"device kernel {name} takes {list(kernel.args)}, not {list(values)}")
    try:
        return _BLOCKS[name].pack(*(values[n] for n in kernel.args))
    except struct.error as error:
        raise ValueError(f"device kernel {name}: {error} in {dict(values)}") from error


def unpack(name: str, block: bytes) -> dict[str, int | float]:
    """The arguments in a block, by name."""
    kernel = DEVICE_KERNELS[name]
    return dict(zip(kernel.args, _BLOCKS[name].unpack(block), strict=True))


def make_launch(name: str, parameters: tuple[str | int, ...] = (), **values: float) -> Launch:
    """A launch of a kernel, its grid by the table's rule."""
    kernel = DEVICE_KERNELS[name]
    if len(parameters) != len(kernel.parameters):
        raise ValueError(f"device kernel {name} is made for {kernel.parameters}, not {parameters}")
    at = kernel.geometry(values)
    return Launch(KernelKey(name, parameters), at.grid, at.block, at.shared, pack(name, **values))
