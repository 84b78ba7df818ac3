"""Cases of the kernels of prompts: chunks of many tokens, experts' entries grouped by expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attention_cases import CONTEXT, cache
from attrs import evolve
from kernel_bench import RECORD, Buffer, Case, Ref, same
from kernel_inputs import (
    FLOATS,
    QUANTISED,
    activations,
    extreme_rows,
    narrow_columns,
    nothing_latched,
    stored_rows,
)
from weight_cases import MIXES, SHIFTS, inputs_of

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.layout import WAVE, inner_bytes
from strata_core.kernels.device.prompt_table import ON_MATRIX_UNITS, multiplying
from strata_core.runtime import KernelKey


def prompt_linear_cases(type_name: str) -> Iterator[Case]:
    rng = np.random.default_rng(400 + TYPES[type_name].ggml)
    for columns, tokens in zip(narrow_columns(type_name), (40, 16, 17), strict=True):
        yield _linear_case(type_name, (37, columns), activations(tokens, columns, rng), rng)
    if type_name in FLOATS:
        for rows, columns, tokens in ((130, 520, 70), (64, 256, 32), (1, 33, 2)):
            x = activations(tokens, columns, rng)
            x[-1] = -np.finfo(np.float32).smallest_subnormal  # sums of either zero
            yield _linear_case(type_name, (rows, columns), x, rng)


def _linear_case(
    type_name: str, shape: tuple[int, int], x: np.ndarray, rng: np.random.Generator
) -> Case:
    """`shape`: rows and columns; a bias but for 16 tokens; many rows are aligned."""
    (rows, columns), tokens = shape, len(x)
    shift = 0 if rows >= 64 else SHIFTS[type_name]
    data = stored_rows(type_name, rows, columns, rng)
    buffers = {
        "weight": Buffer(np.concatenate([np.zeros(shift, np.uint8), data.ravel()])),
        "x": Buffer(inputs_of(type_name, x)),
        "out": Buffer(np.zeros((tokens, rows), np.float32)),
    }
    args = {n: Ref(n) for n in buffers} | {"weight": Ref("weight", shift), "bias": 0}
    if tokens != 16:
        buffers["bias"] = Buffer(rng.standard_normal(rows).astype(np.float32))
        args["bias"] = Ref("bias")
    sizes = {"stride": data.shape[1], "tokens": tokens, "rows": rows, "columns": columns}
    key = KernelKey(multiplying("prompt_linear", (type_name,), matrix=False), (type_name,))
    label = f"{key.name} {tokens} x {columns}"
    return Case(label, key, buffers, {**args, **sizes}, {"out": same})


def prompt_extreme_cases(type_name: str) -> Iterator[Case]:
    """Sums as large as they get: one sign, the other, and one that turns."""
    columns, tokens = 512, 3
    x = np.ones((tokens, columns), np.float32)
    x[1], x[2, ::2] = -1, -1
    data = extreme_rows(type_name, columns)
    buffers = {
        "weight": Buffer(data),
        "x": Buffer(inputs_of(type_name, x)),
        "out": Buffer(np.zeros((tokens, len(data)), np.float32)),
    }
    sizes = {"stride": data.shape[1], "tokens": tokens, "rows": len(data), "columns": columns}
    args = {**{n: Ref(n) for n in buffers}, "bias": 0, **sizes}
    key = KernelKey("prompt_linear", (type_name,))
    yield Case("prompt_linear of extremes", key, buffers, args, {"out": same})


HEAD_DIMS = (16, 32, 40, 64, 80, 96, 128, 256, 264)

ATTENTION = (
    (2, 1, 0, 250, 13),
    (1, 3, 40, 280, 11),
    (1, 12, 300, 500, 3),
    (1, 2, 0, 0, 9),
    (1, 8, 0, 231, 41),
    (2, 5, 70, 610, 57),
    (1, 1, 200, 455, 90),
)
"""KV heads, heads of each, window, first position, tokens; the last ones are several blocks, whose
ends lie within a token."""


def _places(tokens: int, buffers: dict[str, Buffer]) -> list[tuple[str, int, Ref]]:
    return [
        ("places", 32 * t + 8 * at, Ref(name))
        for t in range(tokens)
        for at, name in enumerate(("k", "v", "k_scales", "v_scales"))
        if name in buffers
    ]


def _spoil(kept: dict[str, np.ndarray], first: int, end: int) -> None:
    """Make what lies beside positions `first` to `end` - 1 no numbers; of int8, by the scales."""
    for data in kept.values():
        if data.dtype != np.int8:
            data[:, :first] = data[:, end:] = np.nan


def _signs_of_zero(kept: dict[str, np.ndarray], end: int, rng) -> None:
    """Values whose sums are often zeros of either sign; those of the last tokens are positive."""
    v, seen = kept["v"], end - 8
    small = -np.finfo(v.dtype).smallest_subnormal
    v[:, :seen] = np.where(rng.random(v[:, :seen].shape) < 0.02, small, -np.zeros(1, v.dtype))
    v[:, seen:end] = 1


def prompt_attention_cases(kv: str, head_dim: int) -> Iterator[Case]:
    rng = np.random.default_rng(11)
    chosen = [*ATTENTION, *([] if kv == "int8" else [(1, 2, 0, 490, 22)])]
    for number, (kv_heads, group, window, start, tokens) in enumerate(chosen):
        width, end = kv_heads * head_dim, start + tokens
        shape, signs = (tokens, kv_heads * group, head_dim), number == len(ATTENTION)
        kept = cache(kv, width, rng)
        q = rng.standard_normal(shape).astype(np.float32) * np.float32(30 if signs else 1)
        if signs:
            _signs_of_zero(kept, end, rng)
        _spoil(kept, max(0, start - window + 1) if window else 0, end)
        buffers = {name: Buffer(data) for name, data in kept.items()}
        buffers["places"] = Buffer(np.zeros((tokens, 4), np.uint64))
        links = _places(tokens, buffers)
        buffers["q"] = Buffer(q)
        buffers["out"] = Buffer(np.zeros(shape, np.float32))
        buffers["positions"] = Buffer(np.arange(start, end, dtype=np.int32))
        args = {n: Ref(n) for n in ("q", "out", "positions", "places")}
        sizes_of = {"layer_offset": CONTEXT, "tokens": tokens, "width": width}
        sizes_of |= {"kv_heads": kv_heads, "group": group, "window": window}
        label = f"prompt_attention {kv_heads} x {group}, window {window}, from {start}"
        yield Case(
            label + (", signs of zero" if signs else ""),
            KernelKey("prompt_attention", (kv, head_dim)),
            buffers,
            {**args, **sizes_of},
            {"out": same, "places": lambda a: a[:0]},
            links,
        )


def _grouped(picks: np.ndarray, experts: int) -> dict[str, Buffer]:
    counts = np.bincount(picks.ravel(), minlength=experts)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    order = np.argsort(picks.ravel(), kind="stable").astype(np.int32)
    return {"starts": Buffer(starts), "order": Buffer(order)}


def _wave(experts: tuple[int, ...], matrices: dict[str, tuple[str, int]]):
    """Entries of a wave and their links; `matrices`: part to (buffer, bytes of an expert)."""
    wave, links = np.zeros(len(experts), WAVE), []
    wave["expert"] = experts
    for i, expert in enumerate(experts):
        for at, part in enumerate(("gate", "up", "down")):
            if part in matrices:
                name, nbytes = matrices[part]
                links.append(("wave", 32 * i + 8 * at, Ref(name, expert * nbytes)))
    return wave, links


def _picks(tokens: int, top_k: int, experts: int, rng) -> np.ndarray:
    """Picks of which the first expert gets most and the last none."""
    rows = [np.append(0, 1 + rng.permutation(experts - 2)[: top_k - 1]) for _ in range(tokens)]
    return np.array(rows, np.int32)


RAGGED = (0, 1, 15, 16, 17, 33, 129)
"""Tokens of experts: none, one, around the sizes of tiles, several tiles."""


def _ragged_picks(rng) -> np.ndarray:
    """One pick a token; expert i has RAGGED[i] of them."""
    return rng.permutation(np.repeat(np.arange(len(RAGGED)), RAGGED))[:, None].astype(np.int32)


def prompt_expert_cases(gate: str, up: str, down: str) -> Iterator[Case]:
    rng = np.random.default_rng(500 + TYPES[gate].ggml)
    columns = narrow_columns(gate)[1]
    for tokens, rows, spread in ((3, 64, 1), (37, 32, 2)):
        picks = _picks(tokens, 3, 6, rng)
        yield _gate_up_case((gate, up, down), picks, (5, 0, 2), (rows, columns, spread), rng)


def _gate_up_case(
    types: tuple[str, str, str],
    picks: np.ndarray,
    asked: tuple[int, ...],
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Case:
    """`asked` are the experts of the wave; `shape`: rows, columns, spread."""
    gate, up, down = types
    (rows, columns, spread), (tokens, top_k), experts = shape, picks.shape, 7
    gates = stored_rows(gate, experts * rows, columns, rng)
    ups = stored_rows(up, experts * rows, columns, rng)
    sizes = {"gate": ("gates", rows * gates.shape[1]), "up": ("ups", rows * ups.shape[1])}
    wave, links = _wave(asked, sizes)
    # inner activations stay finite: what others would become is unspecified
    x = np.clip(activations(tokens, columns, rng), -9, 9) * np.float32(0.1)
    pitch = inner_bytes(rows)
    floats = Buffer(np.zeros((picks.size, pitch // 4), np.float32))
    records = Buffer(np.zeros((picks.size, -(-rows // 256)), RECORD), pitch=pitch)
    buffers = {"gates": Buffer(gates), "ups": Buffer(ups), "wave": Buffer(wave)}
    buffers |= {**_grouped(picks, experts), "x": Buffer(inputs_of(gate, x))}
    buffers |= {"status": Buffer(nothing_latched())}
    buffers["inner"] = floats if down in FLOATS else records
    args = {n: Ref(n) for n in ("wave", "starts", "order", "x", "inner", "status")}
    numbers = {"experts": len(wave), "top_k": top_k, "rows": rows, "columns": columns}
    strides = {"gate_stride": gates.shape[1], "up_stride": ups.shape[1]}
    return Case(
        f"prompt_gate_up {tokens} tokens, {rows} x {columns}",
        KernelKey("prompt_gate_up", types),
        buffers,
        {**args, **numbers, **strides, "spread": spread, "op": 4},
        {"inner": same, "status": same, "wave": lambda a: a[:0]},
        links,
    )


def prompt_down_cases(type_name: str) -> Iterator[Case]:
    rng = np.random.default_rng(600 + TYPES[type_name].ggml)
    for tokens, columns in zip((3, 20, 37), narrow_columns(type_name), strict=True):
        picks = _picks(tokens, 3, 6, rng)
        yield _down_case(type_name, picks, (0, 5, 1), (40, columns, 1), rng)


def _down_case(
    type_name: str,
    picks: np.ndarray,
    asked: tuple[int, ...],
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Case:
    """`asked` are the experts of the wave; `shape`: rows, columns, spread."""
    (rows, columns, spread), experts = shape, 7
    data = stored_rows(type_name, experts * rows, columns, rng)
    wave, links = _wave(asked, {"down": ("matrix", rows * data.shape[1])})
    x = activations(picks.size, columns, rng)
    pitch = inner_bytes(columns)
    floats = np.zeros((picks.size, pitch // 4), np.float32)
    floats[:, :columns] = x
    quantised = type_name not in FLOATS
    buffers = {
        "wave": Buffer(wave),
        **_grouped(picks, experts),
        "inner": Buffer(inputs_of(type_name, x), pitch=pitch) if quantised else Buffer(floats),
        "out": Buffer(np.zeros((picks.size, rows), np.float32)),
    }
    args = {n: Ref(n) for n in buffers}
    buffers["matrix"] = Buffer(data)
    numbers = {"experts": len(wave), "rows": rows, "columns": columns, "spread": spread}
    return Case(
        f"prompt_down {len(picks)} tokens, {rows} x {columns}",
        KernelKey("prompt_down", (type_name,)),
        buffers,
        {**args, **numbers, "stride": data.shape[1]},
        {"out": same, "wave": lambda a: a[:0]},
        links,
    )


def prompt_ragged_cases(type_name: str) -> Iterator[Case]:
    """Experts with numbers of tokens around the sizes of tiles, in one wave."""
    rng = np.random.default_rng(700 + TYPES[type_name].ggml)
    picks, columns = _ragged_picks(rng), narrow_columns(type_name)[1]
    asked = tuple(rng.permutation(len(RAGGED)).tolist())
    yield _gate_up_case((type_name,) * 3, picks, asked, (32, columns, 2), rng)
    yield _down_case(type_name, picks, asked, (40, columns, 2), rng)


def grouping_cases() -> Iterator[Case]:
    """prompt_group, and prompt_combine behind it."""
    rng = np.random.default_rng(12)
    for count, experts in ((1, 1), (40, 5), (2500, 60), (5000, 3), (1024, 300)):
        picks = rng.integers(0, experts, count).astype(np.int32)
        starts, order = np.zeros(experts + 1, np.int32), np.zeros(count, np.int32)
        buffers = {n: Buffer(a) for n, a in zip(("picks", "starts", "order"),
                                                (picks, starts, order), strict=True)}  # fmt: skip
        args = {**{n: Ref(n) for n in buffers}, "count": count, "experts": experts}
        label = f"prompt_group {count} of {experts}"
        yield Case(label, KernelKey("prompt_group"), buffers, args, {"starts": same, "order": same})
    for tokens, top_k, width in ((1, 8, 300), (20, 2, 64)):
        buffers = {
            "x": Buffer(rng.standard_normal((tokens, width)).astype(np.float32)),
            "rows": Buffer(rng.standard_normal((tokens * top_k, width)).astype(np.float32)),
            "weights": Buffer(rng.random((tokens, top_k)).astype(np.float32)),
        }
        args = {n: Ref(n) for n in buffers} | {"tokens": tokens, "top_k": top_k, "width": width}
        label = f"prompt_combine {tokens}x{top_k}x{width}"
        yield Case(label, KernelKey("prompt_combine"), buffers, args, {"x": same})


def on_matrix_units(cases: Iterator[Case]) -> Iterator[Case]:
    """The cases of products among them that a kernel for matrix units takes, with that kernel."""
    for case in cases:
        found = ON_MATRIX_UNITS.get(case.key.name)
        multiplies = case.key.name != "prompt_attention"
        if found is not None and multiplies and case.key.parameters[0] not in FLOATS:
            key = KernelKey(found[0], case.key.parameters)
            yield evolve(case, key=key, label=case.label.replace(case.key.name, found[0]))


def prompt_cases() -> Iterator[Case]:
    """Every type in every kernel, and mixtures of types in experts."""
    yield from grouping_cases()
    products = list(prompt_product_cases())
    yield from products
    yield from on_matrix_units(products)
    for kv in ("fp32", "fp16", "int8"):
        for head_dim in HEAD_DIMS:
            if kv != "int8" or head_dim % 32 == 0:
                yield from prompt_attention_cases(kv, head_dim)


def prompt_cases_of(type_name: str) -> Iterator[Case]:
    """A type in every kernel that multiplies."""
    yield from prompt_linear_cases(type_name)
    yield from prompt_down_cases(type_name)
    yield from prompt_expert_cases(type_name, type_name, type_name)
    yield from prompt_ragged_cases(type_name)
    if type_name in QUANTISED:
        yield from prompt_extreme_cases(type_name)


def prompt_product_cases() -> Iterator[Case]:
    """Every type, and mixtures of types in experts."""
    for name in TYPES:
        yield from prompt_cases_of(name)
    for mix in MIXES:
        yield from prompt_expert_cases(*mix)
