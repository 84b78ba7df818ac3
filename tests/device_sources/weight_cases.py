"""Cases of the kernels that read weights: embed, linear, gate_up, down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kernel_bench import RECORD, Buffer, Case, Ref, same
from kernel_inputs import (
    FLOATS,
    activations,
    narrow_columns,
    nothing_latched,
    records_of,
    stored_rows,
)

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.layout import ENTRY, inner_bytes, record_bytes
from strata_core.kernels.device.table import gate_up_warps
from strata_core.runtime import PLAIN_ROOM, KernelKey

SHIFTS = {name: 1 if name == "MXFP4" else 2 for name in TYPES} | {"F32": 4}
"""Bytes by which weights may lie off every larger boundary."""


def embed_cases(type_name: str) -> Iterator[Case]:
    rng = np.random.default_rng(TYPES[type_name].ggml)
    for columns in narrow_columns(type_name)[:2]:
        for host in (False, True):
            table = stored_rows(type_name, 5, columns, rng)
            ids = np.array([2, 0, 4, 1], np.int32)
            buffers = {
                "ids": Buffer(ids),
                "table": Buffer(table, host=host),
                "out": Buffer(np.zeros((4, columns), np.float32)),
            }
            sizes = {"stride": table.shape[1], "tokens": 4, "width": columns}
            yield Case(
                f"embed {columns}" + " from the host" * host,
                KernelKey("embed", (type_name,)),
                buffers,
                {**{n: Ref(n) for n in buffers}, **sizes},
                {"out": same},
            )


def inputs_of(type_name: str, x: np.ndarray) -> np.ndarray:
    """Activations as rows of a type take them."""
    return x if type_name in FLOATS else records_of(x)


def linear_cases(type_name: str) -> Iterator[Case]:
    rng = np.random.default_rng(100 + TYPES[type_name].ggml)
    for columns, tokens in zip(narrow_columns(type_name) * 2, (1, 2, 1, 3, 8, 8), strict=True):
        for shift in (0, SHIFTS[type_name]):
            rows = 37
            data = stored_rows(type_name, rows, columns, rng)
            lead = np.zeros(shift, np.uint8)
            x = activations(tokens, columns, rng)
            if type_name in FLOATS:
                # products below the smallest float: stripes of -0
                x[-1] = -np.abs(x[-1]) * np.float32(1e-38)
                data[3] = stored_rows(type_name, 1, columns, rng)[0] & 0x7F
                data[3] &= np.array([0xFF, 0x0F] * (data.shape[1] // 2), np.uint8)
            buffers = {
                "weight": Buffer(np.concatenate([lead, data.ravel()])),
                "x": Buffer(inputs_of(type_name, x)),
                "out": Buffer(np.zeros((tokens, rows), np.float32)),
            }
            args = {n: Ref(n) for n in buffers} | {"weight": Ref("weight", shift), "bias": 0}
            if shift:
                buffers["bias"] = Buffer(rng.standard_normal(rows).astype(np.float32))
                args["bias"] = Ref("bias")
            sizes = {"stride": data.shape[1], "tokens": tokens, "rows": rows, "columns": columns}
            yield Case(
                f"linear {tokens} x {columns}" + f" shifted by {shift}" * bool(shift),
                KernelKey("linear", (type_name,)),
                buffers,
                {**args, **sizes},
                {"out": same},
            )


def _picks(tokens: int, top_k: int, experts: int, rng) -> np.ndarray:
    """Picks of a window, some experts shared by tokens."""
    return np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int32)


def _entries(picks: np.ndarray, absent: int) -> tuple[np.ndarray, list[int]]:
    """Entries without addresses, and the numbers of those that this device computes."""
    flat = picks.ravel()
    entries = np.zeros(flat.size, ENTRY)
    entries["expert"] = flat
    entries["first"] = [int(np.flatnonzero(flat == pick)[0]) for pick in flat]
    return entries, [i for i, pick in enumerate(flat) if pick != absent]


def expert_cases(gate: str, up: str, down: str) -> Iterator[Case]:
    """gate_up for windows of 1, 3 and 8 tokens; one expert belongs to another lane."""
    rng = np.random.default_rng(200 + TYPES[gate].ggml)
    columns, top_k, experts = narrow_columns(gate)[1], 4, 6
    for tokens, rows in ((1, 96), (3, 32), (8, 64)):
        picks = _picks(tokens, top_k, experts, rng)
        entries, mine = _entries(picks, int(picks[0, 1]))
        weights = {
            "gates": stored_rows(gate, experts * rows, columns, rng),
            "ups": stored_rows(up, experts * rows, columns, rng),
        }
        links = []
        for i in mine:
            for at, (name, data) in zip((0, 8), weights.items(), strict=True):
                offset = int(entries["expert"][i]) * rows * data.shape[1]
                links.append(("entries", 48 * i + at, Ref(name, offset)))
            links.append(("entries", 48 * i + 16, Ref("gates")))
        # inner activations stay finite: what others would become is unspecified
        x = inputs_of(gate, np.clip(activations(tokens, columns, rng), -9, 9) * np.float32(0.1))
        pitch = inner_bytes(rows)
        inner = np.zeros((picks.size, -(-rows // 256)), RECORD)
        floats = np.zeros((picks.size, pitch // 4), np.float32)
        buffers = {n: Buffer(data) for n, data in weights.items()}
        buffers |= {"entries": Buffer(entries), "x": Buffer(x), "status": Buffer(nothing_latched())}
        buffers["inner"] = Buffer(floats) if down in FLOATS else Buffer(inner, pitch=pitch)
        args = {n: Ref(n) for n in ("entries", "x", "inner", "status")}
        sizes = {"count": picks.size, "top_k": top_k, "rows": rows, "columns": columns, "op": 4}
        strides = {
            "gate_stride": weights["gates"].shape[1],
            "up_stride": weights["ups"].shape[1],
        }
        for warps in {0, gate_up_warps(*strides.values(), PLAIN_ROOM), 2}:
            yield Case(
                f"gate_up {tokens} tokens, {rows} x {columns}, {warps} warps",
                KernelKey("gate_up", (gate, up, down)),
                buffers,
                {**args, **sizes, **strides, "warps": warps},
                {"inner": same, "status": same, "entries": lambda a: a[:0]},
                links,
            )


def down_cases(type_name: str) -> Iterator[Case]:
    rng = np.random.default_rng(300 + TYPES[type_name].ggml)
    top_k, experts, rows = 4, 6, 40
    for tokens, columns in zip((1, 3, 8), narrow_columns(type_name), strict=True):
        picks = _picks(tokens, top_k, experts, rng)
        entries, mine = _entries(picks, int(picks[0, 1]))
        data = stored_rows(type_name, experts * rows, columns, rng)
        links = []
        for i in mine:
            offset = int(entries["expert"][i]) * rows * data.shape[1]
            links += [("entries", 48 * i + at, Ref("matrix", offset)) for at in (0, 8, 16)]
            links.append(("entries", 48 * i + 24, Ref("rows", 4 * rows * i)))
        x = activations(picks.size, columns, rng)
        pitch = inner_bytes(columns)
        if type_name in FLOATS:
            padded = np.zeros((picks.size, pitch // 4), np.float32)
            padded[:, :columns] = x
            inner = Buffer(padded)
        else:
            assert record_bytes(columns) <= pitch
            inner = Buffer(records_of(x), pitch=pitch)
        buffers = {
            "entries": Buffer(entries),
            "inner": inner,
            "matrix": Buffer(data),
            "rows": Buffer(np.zeros((picks.size, rows), np.float32)),
        }
        sizes = {"stride": data.shape[1], "count": picks.size, "rows": rows, "columns": columns}
        yield Case(
            f"down {tokens} tokens, {rows} x {columns}",
            KernelKey("down", (type_name,)),
            buffers,
            {"entries": Ref("entries"), "inner": Ref("inner"), **sizes},
            {"rows": same, "entries": lambda a: a[:0]},
            links,
        )


MIXES = (
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q4_K", "Q4_K", "Q4_K"),
    ("Q4_K", "Q5_K", "Q8_0"),
    ("Q8_0", "Q8_0", "F16"),
    ("F16", "F16", "Q8_0"),
    ("BF16", "F32", "BF16"),
)
"""Types of gate, up and down that differ."""


def weight_cases() -> Iterator[Case]:
    """Every type in every kernel, and mixtures of types in experts."""
    for name in TYPES:
        yield from embed_cases(name)
        yield from linear_cases(name)
        yield from down_cases(name)
        yield from expert_cases(name, name, name)
    for mix in MIXES:
        yield from expert_cases(*mix)
