"""Cases of the fused kernels; the oracle does what the plain kernels do, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attention_cases import CONTEXT, KV_TYPES, POSITIONS, placed
from buffer_cases import cells_of
from kernel_bench import RECORD, Buffer, Case, Ref, same
from kernel_inputs import activations, narrow_columns, nothing_latched, records_of, stored_rows
from wait_cases import WAITS

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.layout import ENTRY, LANES
from strata_core.runtime import KernelKey


def _records(rows: int, width: int) -> np.ndarray:
    return np.zeros((rows, -(-width // 256)), RECORD)


def _case(name, label, parameters, buffers, looks, sizes, links=(), **args):
    refs = {n: Ref(n) for n in buffers if n not in args} | args
    made = {n: b if isinstance(b, Buffer) else Buffer(b) for n, b in buffers.items()}
    looks = dict.fromkeys(looks, same) if not isinstance(looks, dict) else looks
    key = KernelKey(name, tuple(parameters))
    return Case(f"{name} {label}", key, made, {**refs, **sizes}, looks, list(links))


def norms(rng) -> Iterator[Case]:
    for rows, dim, bad in ((1, 2048, None), (3, 256, None), (8, 800, None), (2, 4096, np.inf)):
        x = rng.standard_normal((rows, dim)).astype(np.float32)
        if bad:
            x[1, 7] = bad
        buffers = {
            "x": x,
            "gain": rng.standard_normal(dim).astype(np.float32),
            "out": np.zeros_like(x),
            "records": _records(rows, dim),
            "status": nothing_latched(),
        }
        sizes = {"rows": rows, "dim": dim, "eps": 1e-6, "op": 7}
        looks = dict.fromkeys(("out", "records", "status"), same)
        if bad:
            looks |= dict.fromkeys(("out", "records"), lambda a: a[:0])
        yield _case("norm_rows", f"{rows}x{dim}", (), buffers, looks, sizes)


def prompt_norms(rng) -> Iterator[Case]:
    """Norms of rows behind nothing, behind a sum and behind a combine."""
    for rows, dim, bad, packed in (
        (9, 2048, None, True),
        (10, 800, None, True),
        (12, 256, np.inf, True),
        (9, 1056, None, False),
    ):
        x = activations(rows, dim, rng)
        if bad:
            x[1, 7] = bad
        buffers = {
            "x": x,
            "gain": rng.standard_normal(dim).astype(np.float32),
            "out": np.zeros_like(x),
        }
        sizes = {"rows": rows, "dim": dim, "eps": 1e-6, "op": 7 * packed}
        looks = dict.fromkeys(("out", *(("records", "status") if packed else ())), same)
        if bad:
            looks |= dict.fromkeys(("out", "records"), lambda a: a[:0])
        none = {} if packed else {"records": 0, "status": 0}
        if packed:
            buffers |= {"records": _records(rows, dim), "status": nothing_latched()}
            yield _case("prompt_norm", f"{rows}x{dim}", (), buffers, looks, sizes)
        summed = same if not bad else lambda a: a[2:]
        y = {"y": rng.standard_normal((rows, dim)).astype(np.float32)}
        label, more = f"{rows}x{dim}", looks | {"x": summed}
        yield _case("prompt_add_norm", label, (), buffers | y, more, sizes, **none)
        for top_k in (1, 8, 11):
            entries = rng.standard_normal((rows * top_k, dim)).astype(np.float32)
            weights = rng.random((rows, top_k)).astype(np.float32)
            made = buffers | {"experts": entries, "weights": weights}
            label = f"{rows}x{dim} of {top_k}"
            counts = sizes | {"top_k": top_k}
            yield _case("prompt_combine_norm", label, (), made, more, counts, **none)


def routers(name: str, rng) -> Iterator[Case]:
    for rows, dim, outputs, packed in ((1, 2048, 37, 1), (2, 288, 20, 1), (2, 96, 9, 0)):
        buffers = {
            "x": rng.standard_normal((rows, dim)).astype(np.float32),
            "gain": rng.standard_normal(dim).astype(np.float32),
            "weight": stored_rows(name, outputs, dim, rng),
            "out": np.zeros((rows, dim), np.float32),
            "product": np.zeros((rows, outputs), np.float32),
        }
        sizes = {"stride": buffers["weight"].shape[1], "rows": rows, "dim": dim}
        sizes |= {"outputs": outputs, "eps": 1e-6, "op": 5 * packed}
        looks, args = ["out", "product"], {"bias": 0, "records": 0, "status": 0}
        if packed:
            buffers |= {"records": _records(rows, dim), "status": nothing_latched()}
            buffers["bias"] = rng.standard_normal(outputs).astype(np.float32)
            looks, args = [*looks, "records", "status"], {}
        label = f"{rows}x{dim} to {outputs}"
        yield _case("norm_linear", label, (name,), buffers, looks, sizes, **args)


def combines(rng) -> Iterator[Case]:
    for rows, dim, top_k, packed in (
        (1, 2048, 8, 1),
        (3, 256, 2, 1),
        (8, 96, 4, 1),
        (2, 512, 3, 0),
    ):
        count = rows * top_k
        far = Buffer(rng.standard_normal((count, dim)).astype(np.float32), host=True)
        near = rng.standard_normal((count, dim)).astype(np.float32)
        links = [
            ("entries", 48 * i + 24, Ref("far" if i % 3 else "near", 4 * dim * i))
            for i in range(count)
        ]
        buffers = {
            "x": rng.standard_normal((rows, dim)).astype(np.float32),
            "entries": np.zeros(count, ENTRY),
            "weights": rng.random((rows, top_k)).astype(np.float32),
            "gain": rng.standard_normal(dim).astype(np.float32),
            "out": np.zeros((rows, dim), np.float32),
            "near": near,
            "far": far,
        }
        used = {n: Ref(n) for n in ("x", "entries", "weights", "gain", "out")}
        used |= {"records": 0, "status": 0}
        sizes = {"rows": rows, "dim": dim, "top_k": top_k, "eps": 1e-5, "op": 3 * packed}
        looks = {"x": same, "out": same, "entries": lambda a: a[:0]}
        if packed:
            buffers |= {"records": _records(rows, dim), "status": nothing_latched()}
            used |= {n: Ref(n) for n in ("records", "status")}
            looks |= {"records": same, "status": same}
        for waiting in WAITS:
            words, given, looked = waiting.parts()
            made = {
                n: b if isinstance(b, Buffer) else Buffer(b) for n, b in buffers.items()
            } | words
            args = {**used, **given, **sizes}
            label = f"combine_norm {rows}x{dim} of {top_k}{waiting.label}"
            yield Case(label, KernelKey("combine_norm"), made, args, {**looks, **looked}, links)


def products(types, rng) -> Iterator[Case]:
    for tokens, rows in ((1, (37, 16, 5)), (3, (40, 8, 0)), (8, (64, 33, 20))):
        columns = max(narrow_columns(name)[1] for name in types)
        if any(TYPES[name].block == 256 for name in types):
            columns = 768
        buffers = {"x": records_of(activations(tokens, columns, rng))}
        args = {}
        sizes = {"tokens": tokens, "columns": columns}
        for n, name, count in zip("abc", types, rows, strict=True):
            weight = stored_rows(name, max(count, 1), columns, rng)
            sizes |= {f"stride_{n}": weight.shape[1] if count else 0, f"rows_{n}": count}
            names = [f"{a}_{n}" for a in ("weight", "out", "bias")]
            if not count:
                args |= dict.fromkeys(names, 0)
                continue
            buffers |= {names[0]: weight, names[1]: np.zeros((tokens, count), np.float32)}
            if n == "b":
                buffers[names[2]] = rng.standard_normal(count).astype(np.float32)
            else:
                args[names[2]] = 0
        looks = [name for name in buffers if name.startswith("out")]
        yield _case("products", f"{tokens} x {columns}", types, buffers, looks, sizes, **args)


def added(name: str, rng) -> Iterator[Case]:
    for tokens, columns in zip((1, 3, 8), narrow_columns(name), strict=True):
        x = activations(tokens, columns, rng)
        buffers = {
            "weight": stored_rows(name, 45, columns, rng),
            "x": records_of(x) if name in UNPACK else x,
            "out": np.zeros((tokens, 45), np.float32),
            "sum": rng.standard_normal((tokens, 45)).astype(np.float32),
        }
        sizes = {"stride": buffers["weight"].shape[1], "tokens": tokens, "rows": 45}
        sizes["columns"] = columns
        args = {"bias": 0}
        if tokens == 3:
            buffers["bias"] = rng.standard_normal(45).astype(np.float32)
            args = {}
        looks = ["out", "sum"]
        yield _case("linear_add", f"{tokens} x {columns}", (name,), buffers, looks, sizes, **args)


HEADS = (
    (128, 64, 4, 2, 1, True),
    (64, 32, 3, 1, 8, True),
    (96, 16, 2, 2, 3, False),
    (256, 128, 2, 1, 2, True),
)
PROMPT_HEADS = (
    (128, 64, 14, 3, 9, True),
    (64, 32, 3, 1, 13, True),
    (128, 64, 9, 9, 10, False),
    (256, 128, 4, 2, 12, True),
)
"""Elements of a head, pairs that turn, heads of q, of k, tokens, whether they are normed."""


def heads(kv: str, rng, name: str = "heads", chosen=HEADS) -> Iterator[Case]:
    for head_dim, half, n_heads, kv_heads, tokens, gains in chosen:
        width = kv_heads * head_dim
        buffers, links = placed(kv, width, tokens, rng)
        angle = rng.uniform(-9, 9, (tokens, half))
        buffers |= {
            "q": Buffer(rng.standard_normal((tokens, n_heads * head_dim)).astype("<f4")),
            "k": Buffer(rng.standard_normal((tokens, width)).astype("<f4")),
            "v": Buffer(rng.standard_normal((tokens, width)).astype("<f4")),
            "cos": Buffer(np.cos(angle).astype("<f4")),
            "sin": Buffer(np.sin(angle).astype("<f4")),
            "positions": Buffer(np.arange(tokens, dtype=np.int32) // 2 + 9),
            "status": Buffer(nothing_latched()),
        }
        if gains:
            buffers["q_gain"] = Buffer(rng.standard_normal(head_dim).astype("<f4"))
            buffers["k_gain"] = Buffer(rng.standard_normal(head_dim).astype("<f4"))
        named = ("q", "k", "v", "q_gain", "k_gain", "cos", "sin", "positions", "places", "status")
        args = {n: Ref(n) if n in buffers else 0 for n in named}
        sizes = {"layer_offset": CONTEXT, "tokens": tokens, "heads": n_heads}
        sizes |= {"kv_heads": kv_heads, "head_dim": head_dim, "half": half, "width": width}
        sizes |= {"eps": 1e-6 if gains else 0.0, "op": 11}
        written = [n for n in buffers if n[0] in "kv" and n[-1] in "01"]
        looks = dict.fromkeys(["q", "k", "status", *written], same)
        looks["places"] = lambda a: a[:0]
        label = f"{name} {tokens}x{n_heads}+{kv_heads}x{head_dim}/{half}" + " normed" * gains
        yield Case(label, KernelKey(name, (kv,)), buffers, {**args, **sizes}, looks, links)


def merges(head_dim: int, rng) -> Iterator[Case]:
    for heads_, window in ((4, 0), (6, 300)):
        tokens, splits, width = len(POSITIONS), 3, heads_ * head_dim
        partials = rng.standard_normal((tokens, heads_, splits, 8 + head_dim)).astype(np.float32)
        partials[..., 0] *= 40
        partials[..., 1] = rng.uniform(1, 200, partials.shape[:-1])
        buffers = {
            "out": np.zeros((tokens, width), np.float32),
            "partials": partials,
            "positions": np.array(POSITIONS, np.int32),
            "records": _records(tokens, width),
            "status": nothing_latched(),
        }
        sizes = {"tokens": tokens, "heads": heads_, "window": window, "splits": splits}
        sizes |= {"width": width, "op": 2}
        looks = dict.fromkeys(["out", "records", "status"], same)
        looks["partials"] = lambda a: a[:0]
        yield _case("merge_quantise", f"{heads_}, {window}", (head_dim,), buffers, looks, sizes)


def silus(rng) -> Iterator[Case]:
    for rows, width in ((1, 768), (3, 32), (8, 800)):
        gate, up = (rng.standard_normal((rows, width)).astype(np.float32) * 9 for _ in range(2))
        buffers = {"gate": gate, "up": up, "records": _records(rows, width)}
        buffers["status"] = nothing_latched()
        sizes = {"rows": rows, "width": width, "op": 2}
        looks = ["gate", "records", "status"]
        label = f"{rows}x{width}"
        yield _case("silu_quantise", label, (), buffers, looks, sizes, out=Ref("gate"))


def dispatches(rng) -> Iterator[Case]:
    shapes = ((1, 128, 8, 1), (8, 128, 8, 0), (3, 60, 4, 1), (2, 512, 10, 1), (8, 1024, 8, 1))
    for tokens, experts, top_k, mail in shapes:
        count = tokens * top_k
        logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 3
        logits[-1, ::2] = logits[-1, 0]
        logits[:, :4] += 6
        buffers = {
            "logits": logits,
            "picks": np.zeros((tokens, top_k), np.int32),
            "weights": np.zeros((tokens, top_k), np.float32),
            "status": nothing_latched(),
            "cells": cells_of(experts, rng),
            "share": np.array([rng.integers(0, m + 1) for m in range(count + 1)], np.int32),
            "x": rng.standard_normal((tokens, 72)).astype(np.float32),
            "entries": np.zeros(count, ENTRY),
            "counts": np.arange(LANES, dtype=np.uint64),
            "round": np.array([77], np.int64),
            "rows": np.zeros((count, 100), np.float32),
            "host_rows": Buffer(np.zeros((count, 100), np.float32), host=True),
        }
        post = {
            "mail_x": np.zeros((tokens, 72), np.float32),
            "mail_picks": np.zeros(count, np.int32),
            "mail_lanes": np.zeros(count, np.int32),
            "mail_host": np.zeros(count, np.int32),
            "mail_word": np.zeros(8, np.int64),
        }
        args = {} if mail else dict.fromkeys(post, 0)
        if mail:
            buffers |= {n: Buffer(data, host=True) for n, data in post.items()}
        sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "inputs": 72}
        sizes |= {"outputs": 100, "renormalise": mail, "op": 9}
        looks = ["picks", "weights", "status", "entries", "counts", *(post if mail else ())]
        label = f"{tokens}x{experts} top {top_k}"
        yield _case("dispatch", label, (), buffers, looks, sizes, **args)


MIXES = (
    ("Q8_0",) * 3,
    ("Q4_K", "Q4_K", "Q6_K"),
    ("MXFP4", "MXFP4", "MXFP4"),
    ("Q5_0", "Q5_0", "Q5_1"),
)


def fused_cases(*, every: bool = True) -> Iterator[Case]:
    """All of them, or a few of each kernel."""
    rng = np.random.default_rng(21)
    for make in (norms, prompt_norms, combines, silus, dispatches):
        yield from make(rng)
    for types in MIXES if every else MIXES[1:2]:
        yield from products(types, rng)
    for name in TYPES if every else ("Q8_0", "F16"):
        yield from added(name, rng)
    for name in ("F32", "F16", "BF16") if every else ("F32",):
        yield from routers(name, rng)
    for kv in KV_TYPES:
        yield from heads(kv, rng)
        yield from heads(kv, rng, "prompt_heads", PROMPT_HEADS)
    for head_dim in (64, 80, 128) if every else (80,):
        yield from merges(head_dim, rng)
