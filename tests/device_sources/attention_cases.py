"""Cases of kv_append, attention and merge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kernel_bench import Buffer, Case, Ref, same
from kernel_inputs import nothing_latched

from strata_core.runtime import KernelKey

KV_TYPES = ("fp32", "fp16", "int8")
DTYPES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
CONTEXT, LAYERS = 800, 2
POSITIONS = (0, 5, 31, 32, 255, 256, 300, 700)
LATER = (398, 250, 399, 251, 400, 252)
"""Windows of two sequences, most of whose positions are older."""


def cache(kv: str, width: int, rng) -> dict[str, np.ndarray]:
    """Keys and values of one sequence, [layers, context, width], with half scales for int8."""
    shape = (LAYERS, CONTEXT, width)
    if kv != "int8":
        return {n: rng.standard_normal(shape).astype(DTYPES[kv]) for n in ("k", "v")}
    made = {n: rng.integers(-127, 128, shape, np.int8) for n in ("k", "v")}
    for name in ("k_scales", "v_scales"):
        made[name] = rng.uniform(0.001, 0.02, (*shape[:2], width // 32)).astype(np.float16)
    return made


def placed(kv: str, width: int, tokens: int, rng):
    """Buffers and links of two sequences whose tokens take turns."""
    buffers, links = {}, []
    for number in range(2):
        for name, data in cache(kv, width, rng).items():
            buffers[f"{name}{number}"] = Buffer(data)
    buffers["places"] = Buffer(np.zeros((tokens, 4), np.uint64))
    for t in range(tokens):
        for at, name in enumerate(("k", "v", "k_scales", "v_scales")):
            if f"{name}0" in buffers:
                links.append(("places", 32 * t + 8 * at, Ref(f"{name}{t % 2}")))
    return buffers, links


def append_cases(kv: str) -> Iterator[Case]:
    rng = np.random.default_rng(7)
    for tokens, width, bad in ((1, 64, None), (8, 544, None), (3, 64, np.inf), (3, 64, 7e4)):
        buffers, links = placed(kv, width, tokens, rng)
        k, v = (rng.standard_normal((tokens, width)).astype(np.float32) for _ in range(2))
        k[0, :32] = 0
        v[0, :32] *= np.float32(1e-9)
        if bad is not None:
            v[-1, 3] = bad
        positions = np.arange(tokens, dtype=np.int32) // 2 + 9
        buffers |= {"rows_k": Buffer(k), "rows_v": Buffer(v), "positions": Buffer(positions)}
        buffers["status"] = Buffer(nothing_latched())
        args = {"k": Ref("rows_k"), "v": Ref("rows_v")}
        args |= {n: Ref(n) for n in ("positions", "places", "status")}
        written = [n for n in buffers if n[0] in "kv" and n[-1] in "01"]
        looks = dict.fromkeys(["status", *written], same)
        if bad is not None:
            # what a row with such a value becomes is unspecified
            looks = {n: (same if n == "status" else lambda a: a[:0]) for n in looks}
        looks["places"] = lambda a: a[:0]
        sizes = {"layer_offset": CONTEXT, "tokens": tokens, "width": width, "op": 11}
        yield Case(
            f"kv_append {tokens} x {width}" + (f" with {bad}" if bad else ""),
            KernelKey("kv_append", (kv,)),
            buffers,
            {**args, **sizes},
            looks,
            links,
        )


def _partial_parts(array: np.ndarray) -> np.ndarray:
    """m, l and the weighted sum of a partial; what lies between is nobody's."""
    return np.delete(array, range(2, 8), axis=-1)


def attention_cases(kv: str, head_dim: int) -> Iterator[Case]:
    rng = np.random.default_rng(8)
    for kv_heads, group, window, positions in (
        (2, 1, 0, POSITIONS),
        (1, 8, 100, POSITIONS),
        (2, 3, 256, POSITIONS),
        (1, 12, 33, POSITIONS),
        (1, 8, 0, LATER),
        (2, 2, 0, (400,)),
        (1, 3, 90, LATER),
    ):
        tokens, width = len(positions), kv_heads * head_dim
        buffers, links = placed(kv, width, tokens, rng)
        splits = 3
        shape = (tokens, kv_heads * group, splits, 8 + head_dim)
        buffers["q"] = Buffer(rng.standard_normal((*shape[:2], head_dim)).astype(np.float32))
        buffers["partials"] = Buffer(np.zeros(shape, np.float32))
        buffers["positions"] = Buffer(np.array(positions, np.int32))
        args = {n: Ref(n) for n in ("q", "partials", "positions", "places")}
        args["ahead"] = Ref("q")
        sizes = {"layer_offset": CONTEXT, "tokens": tokens, "width": width, "kv_heads": kv_heads}
        sizes |= {"group": group, "window": window, "splits": splits}
        sizes["ahead_lines"] = buffers["q"].data.nbytes // 128
        yield Case(
            f"attention {kv_heads} x {group}, window {window}, {tokens} at {positions[0]}",
            KernelKey("attention", (kv, head_dim)),
            buffers,
            {**args, **sizes},
            {"partials": _partial_parts, "places": lambda a: a[:0]},
            links,
        )


def merge_cases(head_dim: int) -> Iterator[Case]:
    rng = np.random.default_rng(9)
    for heads, window in ((4, 0), (3, 300)):
        tokens, splits = len(POSITIONS), 3
        partials = rng.standard_normal((tokens, heads, splits, 8 + head_dim)).astype(np.float32)
        partials[..., 0] *= 40
        partials[..., 1] = rng.uniform(1, 200, partials.shape[:-1])
        buffers = {
            "out": Buffer(np.zeros((tokens, heads, head_dim), np.float32)),
            "partials": Buffer(partials),
            "positions": Buffer(np.array(POSITIONS, np.int32)),
        }
        sizes = {"tokens": tokens, "heads": heads, "window": window, "splits": splits}
        yield Case(
            f"merge {heads} heads, window {window}",
            KernelKey("merge", (head_dim,)),
            buffers,
            {**{n: Ref(n) for n in buffers}, **sizes},
            {"out": same, "partials": lambda a: a[:0]},
        )


def all_attention_cases(head_dims: tuple[int, ...] = (16, 64, 80, 128, 256)) -> Iterator[Case]:
    """Every KV type with every head size that it takes."""
    for kv in KV_TYPES:
        yield from append_cases(kv)
        for head_dim in head_dims:
            if kv != "int8" or head_dim % 32 == 0:
                yield from attention_cases(kv, head_dim)
    for head_dim in head_dims:
        yield from merge_cases(head_dim)
