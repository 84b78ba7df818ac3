"""Fused kernels: each does in one launch what a run of plain launches does, with the same bits.

An entry says which plain kernels it stands for and how their arguments are called here. That is
all there is to know of it: `fuse.py` finds such runs in a lowered program and undoes them for who
has the plain kernels alone. What the plain kernels write is written too.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.entry import (
    WAIT_ARGS,
    WARPS,
    DeviceKernel,
    Geometry,
    Values,
    rows_of_block,
    slot_bytes,
    staged,
    staged_rows,
)
from strata_core.kernels.device.fused_entry import (
    HEADS_ARGS,
    HEADS_RUNS,
    NORM_ARGS,
    NORM_ENDS,
    NORM_PART,
    QUANTISE_PART,
    WIDEST_ROW,
    Fused,
    Part,
)
from strata_core.kernels.device.layout import CELL, MOST_TOKENS
from strata_core.kernels.device.prompt_fused import PROMPT_FUSED
from strata_core.runtime import PLAIN_ROOM

FEW_ROWS, FEW_OUTPUTS = 2, 1024
"""Rows, and outputs of each, for which every block of `norm_linear` makes the norm itself."""

MOST_PICKS = 64
"""Experts of a token that `combine_norm` takes."""


def _norm_shared(a: Values) -> Geometry:
    return Geometry((int(a["rows"]), 1, 1), (1024, 1, 1), 4 * int(a["dim"]))


def _head_threads(a: Values) -> Geometry:
    threads = max(64, -(-int(a["head_dim"]) // 32) * 32)
    return Geometry((int(a["heads"]) + int(a["kv_heads"]), int(a["tokens"]), 1), (threads, 1, 1))


def _norm_linear(a: Values) -> Geometry:
    rows, stride = staged_rows(int(a["stride"])), int(a["stride"])
    slots = WARPS * slot_bytes(stride, rows) if rows else 0
    blocks = -(-int(a["outputs"]) // rows_of_block(stride))
    shared = 4 * int(a["rows"]) * int(a["dim"]) + slots
    return Geometry((blocks, 1, 1), (32 * WARPS, 1, 1), shared)


def _norm_linear_fits(a: Values, types: Sequence[str | int]) -> bool:
    few = a["rows"] <= FEW_ROWS and a["outputs"] <= FEW_OUTPUTS and a["dim"] % 32 == 0
    apart = a["x"] != a["out"] and not any(name in UNPACK for name in types)
    return few and apart and _norm_linear(a).shared + (1 << 10) <= PLAIN_ROOM


NEAR_BYTES = 40 << 10
"""Bytes of shared memory in which `dispatch` keeps the cells of a layer beside its logits."""


def _dispatch_shared(a: Values) -> Geometry:
    logits = 4 * int(a["tokens"]) * (int(a["experts"]) + 96 + int(a["top_k"]))
    both = logits + CELL.itemsize * int(a["experts"])
    return Geometry((1, 1, 1), (1024, 1, 1), both if both <= NEAR_BYTES else logits)


def _row_fits(a: Values, _: Sequence[str | int]) -> bool:
    return a["dim"] <= WIDEST_ROW and a["dim"] % 32 == 0


def _heads_fit(a: Values, _: Sequence[str | int]) -> bool:
    dim = int(a["head_dim"])
    return dim <= 1024 and a["width"] == a["kv_heads"] * dim


_COMBINE = Part(kernel="combine", args={"tokens": "rows", "width": "dim"})

_FLOATS = Part(
    kernel="linear",
    parameters=("type",),
    args={
        "x": "out",
        "out": "product",
        "tokens": "rows",
        "rows": "outputs",
        "columns": "dim",
    },
)


def _product(n: str) -> Part:
    names = ("weight", "out", "bias", "stride", "rows")
    return Part(kernel="linear", parameters=(f"type_{n}",), args={a: f"{a}_{n}" for a in names})


_PRODUCTS: dict[str, str] = {f"rows_{n}": f"stride_{n}" for n in "abc"}

_ALL = (
    Fused(
        kernel=DeviceKernel(
            name="norm_rows",
            args={"x": "ptr", **NORM_ARGS, **NORM_ENDS},
            geometry=_norm_shared,
            summary="rms_norm of whole rows, and their records",
        ),
        runs=((NORM_PART, QUANTISE_PART),),
        fits=_row_fits,
    ),
    Fused(
        kernel=DeviceKernel(
            name="norm_linear",
            parameters=("type",),
            args={
                "x": "ptr",
                "out": "ptr",
                "gain": "ptr",
                "records": "ptr",
                "status": "ptr",
                "weight": "ptr",
                "product": "ptr",
                "bias": "ptr",
                "stride": "i64",
                "rows": "i32",
                "dim": "i32",
                "outputs": "i32",
                "eps": "f32",
                "op": "i32",
            },
            geometry=_norm_linear,
            summary="rms_norm of a few rows, their records unless records is 0, and linear of the "
            "normed rows with a float matrix",
        ),
        runs=((NORM_PART, QUANTISE_PART, _FLOATS), (NORM_PART, _FLOATS)),
        fits=_norm_linear_fits,
    ),
    Fused(
        kernel=DeviceKernel(
            name="combine_norm",
            args={
                "x": "ptr",
                "entries": "ptr",
                "weights": "ptr",
                **WAIT_ARGS,
                **NORM_ARGS,
                "top_k": "i32",
                **NORM_ENDS,
            },
            geometry=_norm_shared,
            summary="combine, then rms_norm of whole rows and, unless records is 0, their records",
        ),
        runs=((_COMBINE, NORM_PART, QUANTISE_PART), (_COMBINE, NORM_PART)),
        fits=lambda a, types: _row_fits(a, types) and a["top_k"] <= MOST_PICKS,
    ),
    Fused(
        kernel=DeviceKernel(
            name="products",
            parameters=("type_a", "type_b", "type_c"),
            args={
                **{f"{name}_{n}": "ptr" for n in "abc" for name in ("weight", "out", "bias")},
                "x": "ptr",
                **{f"stride_{n}": "i64" for n in "abc"},
                **{f"rows_{n}": "i32" for n in "abc"},
                "tokens": "i32",
                "columns": "i32",
            },
            geometry=staged(_PRODUCTS),
            summary="linear with two or three quantised matrices of the same input; rows_c is 0 "
            "where there are two",
        ),
        runs=(
            (_product("a"), _product("b"), _product("c")),
            (_product("a"), _product("b")),
        ),
        fits=lambda _, types: all(name in UNPACK for name in types),
    ),
    Fused(
        kernel=DeviceKernel(
            name="heads",
            parameters=("kv",),
            args=HEADS_ARGS,
            geometry=_head_threads,
            summary="rms_norm of each head of q and k (unless the gains are 0), rope of both, "
            "kv_append; `width`: kv_heads * head_dim",
        ),
        runs=HEADS_RUNS,
        fits=_heads_fit,
    ),
    Fused(
        kernel=DeviceKernel(
            name="merge_quantise",
            parameters=("head_dim",),
            args={
                "out": "ptr",
                "partials": "ptr",
                "positions": "ptr",
                "records": "ptr",
                "status": "ptr",
                "tokens": "i32",
                "heads": "i32",
                "window": "i32",
                "splits": "i32",
                "width": "i32",
                "op": "i32",
            },
            geometry=lambda a: Geometry(
                (-(-int(a["width"]) // 128), int(a["tokens"]), 1), (128, 1, 1)
            ),
            summary="merge, and the records of its rows; `width`: heads * head_dim",
        ),
        runs=(
            (
                Part(kernel="merge", parameters=("head_dim",)),
                Part(kernel="quantise", args={"x": "out", "rows": "tokens"}),
            ),
        ),
    ),
    Fused(
        kernel=DeviceKernel(
            name="linear_add",
            parameters=("type",),
            args={
                "weight": "ptr",
                "x": "ptr",
                "out": "ptr",
                "bias": "ptr",
                "sum": "ptr",
                "stride": "i64",
                "tokens": "i32",
                "rows": "i32",
                "columns": "i32",
            },
            geometry=staged({"rows": "stride"}),
            summary="linear, then add of what it gives to the rows of `sum`",
        ),
        runs=(
            (
                Part(kernel="linear", parameters=("type",)),
                Part(
                    kernel="add",
                    args={"x": "sum", "y": "out", "rows": "tokens", "width": "rows"},
                ),
            ),
        ),
    ),
    Fused(
        kernel=DeviceKernel(
            name="silu_quantise",
            args={
                "gate": "ptr",
                "up": "ptr",
                "out": "ptr",
                "records": "ptr",
                "status": "ptr",
                "rows": "i32",
                "width": "i32",
                "op": "i32",
            },
            geometry=lambda a: Geometry(
                (-(-int(a["width"]) // 256), int(a["rows"]), 1), (256, 1, 1)
            ),
            summary="silu_mul, and the records of its rows; `width` is a multiple of 32",
        ),
        runs=((Part(kernel="silu_mul"), Part(kernel="quantise", args={"x": "out"})),),
    ),
    Fused(
        kernel=DeviceKernel(
            name="dispatch",
            args={
                "logits": "ptr",
                "picks": "ptr",
                "weights": "ptr",
                "status": "ptr",
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
                "experts": "i32",
                "top_k": "i32",
                "inputs": "i32",
                "outputs": "i32",
                "renormalise": "i32",
                "op": "i32",
            },
            geometry=_dispatch_shared,
            summary="route, then assign",
        ),
        runs=((Part(kernel="route"), Part(kernel="assign")),),
        fits=lambda a, _: a["tokens"] <= MOST_TOKENS,
    ),
)

FUSED: dict[str, Fused] = {fused.kernel.name: fused for fused in (*PROMPT_FUSED, *_ALL)}
"""Every fused kernel by name; `fuse.py` tries them in this order."""
