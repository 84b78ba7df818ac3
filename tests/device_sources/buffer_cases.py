"""Cases of the kernels that need no weights: norms, sums, rope, quantising, routing, lanes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kernel_bench import RECORD, Buffer, Case, Ref, same
from kernel_inputs import activations, nothing_latched
from wait_cases import WAITS

from strata_core.kernels.device.layout import CELL, ENTRY, LANES
from strata_core.runtime import KernelKey


def _case(name, label, buffers, looks, links=(), **args):
    """A case whose pointer arguments are the buffers of their names, unless given."""
    refs = {n: Ref(n) for n in buffers if n not in args}
    return Case(
        f"{name} {label}",
        KernelKey(name),
        {n: b if isinstance(b, Buffer) else Buffer(b) for n, b in buffers.items()},
        {**refs, **args},
        looks if isinstance(looks, dict) else dict.fromkeys(looks, same),
        list(links),
    )


def norms(rng) -> Iterator[Case]:
    for rows, runs, dim in ((2, 1, 200), (3, 4, 128), (1, 1, 2048), (2, 2, 16), (1, 1, 64)):
        x = rng.standard_normal((rows, runs * dim)).astype(np.float32)
        x[0, ::3] *= np.float32(1e-20)
        weight = rng.standard_normal(dim).astype(np.float32)
        for place in ("out", "x"):
            buffers = {"x": x, "weight": weight}
            if place == "out":
                buffers["out"] = np.zeros_like(x)
            args = {"rows": rows, "runs": runs, "dim": dim, "eps": 1e-6, "out": Ref(place)}
            yield _case("rms_norm", f"{rows}x{runs}x{dim} to {place}", buffers, [place], **args)


def quantising(rng) -> Iterator[Case]:
    for rows, width in ((1, 32), (3, 96), (2, 256), (1, 2048), (2, 800)):
        x = activations(rows, width, rng)
        records = np.zeros((rows, -(-width // 256)), RECORD)
        buffers = {"x": x, "records": records, "status": nothing_latched()}
        sizes = {"rows": rows, "width": width, "op": 7}
        yield _case("quantise", f"{rows}x{width}", buffers, ["records", "status"], **sizes)
    for value in (np.nan, np.inf, -np.inf):
        x = activations(2, 352, rng)
        x[1, 333] = value
        x[0, 5] = value
        records = Buffer(np.zeros((2, 2), RECORD))
        buffers = {"x": x, "records": records, "status": nothing_latched()}
        # what a window with such a value gives is unspecified, but for the latch
        looks = {"status": same, "records": lambda a: a[:0]}
        yield _case("quantise", f"with {value}", buffers, looks, rows=2, width=352, op=3)


def ropes(rng) -> Iterator[Case]:
    for tokens, heads, head_dim, half in ((3, 4, 64, 32), (1, 2, 128, 64), (8, 3, 80, 20)):
        x = rng.standard_normal((tokens, heads * head_dim)).astype(np.float32)
        angle = rng.uniform(-9, 9, (tokens, half))
        buffers = {"x": x, "cos": np.cos(angle).astype("<f4"), "sin": np.sin(angle).astype("<f4")}
        sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "half": half}
        yield _case("rope", f"{tokens}x{heads}x{head_dim}/{half}", buffers, ["x"], **sizes)


def sums(rng) -> Iterator[Case]:
    wide = np.array([0, -0.0, 87.5, -87.5, 88.5, -88.5, 200, -200, 1e-40, 3e38, -3e38], np.float32)
    for rows, width in ((1, 200), (3, 2048), (2, 31)):
        x, y = (rng.standard_normal((rows, width)).astype(np.float32) * 9 for _ in range(2))
        x[0, :11] = wide
        size = {"rows": rows, "width": width}
        label = f"{rows}x{width}"
        yield _case("add", label, {"x": x, "y": y}, ["x"], **size)
        pair = {"gate": x, "up": y}
        yield _case("silu_mul", label, {**pair, "out": np.zeros_like(x)}, ["out"], **size)
        yield _case("silu_mul", f"{label} in place", pair, ["gate"], out=Ref("gate"), **size)
        gate = np.array([0.3, -87.4, 90.0], np.float32)[:rows]
        yield _case("gate_add", label, {"x": x, "y": y, "gate": gate}, ["x"], **size)
        index = rng.integers(0, rows, 4).astype(np.int32)
        out = np.zeros((4, width), np.float32)
        wanted = {"x": x, "index": index, "out": out}
        yield _case("gather", label, wanted, ["out"], rows=4, width=width)


def combining(rng) -> Iterator[Case]:
    for tokens, top_k, width in ((1, 8, 2048), (3, 2, 200), (8, 4, 64)):
        count = tokens * top_k
        entries = np.zeros(count, ENTRY)
        near = rng.standard_normal((count, width)).astype(np.float32)
        far = rng.standard_normal((count, width)).astype(np.float32)
        links = [
            ("entries", 48 * i + 24, Ref("far" if i % 3 else "near", 4 * width * i))
            for i in range(count)
        ]
        weights = rng.random((tokens, top_k)).astype(np.float32)
        x = rng.standard_normal((tokens, width)).astype(np.float32)
        buffers = {"x": x, "entries": entries, "weights": weights, "near": near}
        buffers["far"] = Buffer(far, host=True)
        for waiting in WAITS:
            words, given, looked = waiting.parts()
            case = _case("combine", f"{tokens}x{top_k}x{width}", {**buffers, **words}, ["x"], links)
            used = {n: case.args[n] for n in ("x", "entries", "weights")} | given
            sizes = {"tokens": tokens, "top_k": top_k, "width": width}
            looks = {"x": same, "entries": lambda a: a[:0]} | looked
            label = f"{case.label}{waiting.label}"
            yield Case(label, case.key, case.buffers, {**used, **sizes}, looks, links)


def routing(rng) -> Iterator[Case]:
    shapes = ((1, 8, 2), (3, 60, 4), (8, 128, 8), (2, 256, 8), (1, 1000, 10), (2, 5, 5))
    for tokens, experts, top_k in shapes:
        for renormalise in (0, 1):
            logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 4
            logits[-1, ::2] = logits[-1, 0]
            logits[0, :4] = (0.0, -0.0, -100.0, -0.0)
            buffers = {
                "logits": logits,
                "picks": np.zeros((tokens, top_k), np.int32),
                "weights": np.zeros((tokens, top_k), np.float32),
                "status": nothing_latched(),
            }
            sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "op": 5}
            label = f"{tokens}x{experts} top {top_k}" + " renormalised" * renormalise
            looks = ["picks", "weights", "status"]
            yield _case("route", label, buffers, looks, renormalise=renormalise, **sizes)
    for value in (np.nan, np.inf, -np.inf):
        logits = rng.standard_normal((2, 64)).astype(np.float32)
        logits[1, 63] = value
        buffers = {
            "logits": logits,
            "picks": np.zeros((2, 4), np.int32),
            "weights": np.zeros((2, 4), np.float32),
            "status": nothing_latched(),
        }
        looks = {
            "status": same,
            "weights": lambda a: a[:1],
            "picks": lambda a: np.append(a[:1].ravel(), (a >= 0).all() and (a < 64).all()),
        }
        sizes = {"tokens": 2, "experts": 64, "top_k": 4, "renormalise": 1, "op": 9}
        yield _case("route", f"with {value}", buffers, looks, **sizes)


def cells_of(experts, rng) -> np.ndarray:
    """Every kind of cell; the addresses are only passed on."""
    cells = np.zeros(experts, CELL)
    for i, kind in enumerate(rng.integers(0, 5, experts)):
        here = 0x7F0000000000 + np.arange(3, dtype=np.uint64) * 512 + i * 4096
        if kind in (0, 4):
            cells[i]["slot"] = here
        if kind in (1, 2, 4):
            cells[i]["alias"] = here + 0x100000000
        if kind == 2:
            cells[i]["helper"] = 1 + i % 3
    return cells


def lanes(rng) -> Iterator[Case]:
    sizes = ((1, 8, 16), (3, 4, 16), (8, 8, 40), (8, 16, 60), (1, 1, 4))
    for tokens, top_k, experts in sizes:
        for mail in (True, False):
            count = tokens * top_k
            picks = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int32)
            share = np.array([rng.integers(0, m + 1) for m in range(count + 1)], np.int32)
            buffers = {
                "picks": picks,
                "cells": cells_of(experts, rng),
                "share": share,
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
            args = {"tokens": tokens, "top_k": top_k, "inputs": 72, "outputs": 100}
            if mail:
                buffers |= {n: Buffer(data, host=True) for n, data in post.items()}
            else:
                args |= dict.fromkeys(post, 0)
            looks = ["entries", "counts", *(post if mail else ())]
            label = f"{tokens}x{top_k} of {experts}" + ("" if mail else " without mail")
            yield _case("assign", label, buffers, looks, **args)
            if mail:
                yield _claim(label, picks, rng)


def _claim(label, picks, rng) -> Case:
    experts, count = int(picks.max()) + 1, picks.size
    of = rng.integers(0, LANES, experts).astype(np.int32)
    cells = np.zeros(experts, CELL)
    cells["slot"] = 0x7E0000000000 + np.arange(3 * experts, dtype=np.uint64).reshape(-1, 3) * 256
    buffers = {
        "mail_picks": Buffer(picks.ravel(), host=True),
        "mail_lanes": Buffer(of[picks.ravel()], host=True),
        "cells": cells,
        "entries": np.zeros(count, ENTRY),
        "host_rows": Buffer(np.zeros((count, 100), np.float32), host=True),
    }
    args = {"count": count, "lane": 4, "outputs": 100}
    return _case("claim", label, buffers, ["entries"], **args)


def signals() -> Iterator[Case]:
    word = Buffer(np.zeros(8, np.int64), host=True)
    yield _case("signal", "", {"word": word, "value": np.array([1 << 40], np.int64)}, ["word"])


def buffer_cases() -> Iterator[Case]:
    """All of them."""
    rng = np.random.default_rng(5)
    for make in (norms, quantising, ropes, sums, combining, routing, lanes):
        yield from make(rng)
    yield from signals()
