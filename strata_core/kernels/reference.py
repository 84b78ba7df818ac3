"""The float32 oracle: every kernel of the table in numpy, slow and obvious.

Weights are dequantised and everything is computed in float32, as transformers does on dequantised
weights. The order of sums is numpy's, so this is the yardstick for closeness, not for bits. A
kernel takes the frame (the window and what belongs to it) and the arguments of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.kernels.experts import ExpertReader
from strata_core.kernels.kv import Floats, KeyValues

Ints = NDArray[np.int32]

ATTENTION_TILE = 128
"""Queries computed at once, so that scores never take more than tile x context a head."""


@frozen
class Run:
    """The tokens `start` to `stop - 1` of a window, which belong to one sequence."""

    kv: KeyValues
    start: int
    stop: int


@frozen(eq=False)
class Frame:
    """What kernels see of one window besides their arguments.

    `ids`, `positions` int32 [T]; `logits_rows` int32 [R]; `runs` the sequences in the window;
    `cos`, `sin` float32 [T, dim / 2] of each token's position; `experts` reads expert weights.
    """

    ids: Ints
    positions: Ints
    logits_rows: Ints
    runs: tuple[Run, ...]
    cos: Floats
    sin: Floats
    experts: ExpertReader


def embed(frame: Frame, table: Floats, out: Floats) -> None:
    """Row of the embedding table for each token."""
    out[:] = table[frame.ids]


def rms_norm(frame: Frame, x: Floats, weight: Floats, out: Floats, dim: int, eps: float) -> None:
    """Each run of `dim` elements over its root mean square, times the weight."""
    del frame
    rows = x.reshape(-1, dim)
    scale = np.float32(1) / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + np.float32(eps))
    out.reshape(-1, dim)[:] = rows * scale * weight


def linear(frame: Frame, x: Floats, weight: Floats, bias: Floats | None, out: Floats) -> None:
    """Products with the weight's rows, plus the bias."""
    del frame
    np.matmul(x, weight.T, out=out)
    if bias is not None:
        out += bias


def rope(frame: Frame, x: Floats, heads: int, head_dim: int) -> None:
    """Rotate the first 2 * cos.shape[1] elements of each head; halves are paired."""
    half = frame.cos.shape[1]
    vectors = x.reshape(-1, heads, head_dim)
    low, high = vectors[..., :half].copy(), vectors[..., half : 2 * half].copy()
    cos, sin = frame.cos[:, None, :], frame.sin[:, None, :]
    vectors[..., :half] = low * cos - high * sin
    vectors[..., half : 2 * half] = high * cos + low * sin


def kv_append(frame: Frame, k: Floats, v: Floats, layer: int) -> None:
    """Store the window's keys and values at their positions."""
    for run in frame.runs:
        rows = slice(run.start, run.stop)
        run.kv.write(layer, frame.positions[rows], k[rows], v[rows])


def attention(
    frame: Frame,
    q: Floats,
    out: Floats,
    layer: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
) -> None:
    """Causal grouped-query attention, each sequence over its own stored positions."""
    for run in frame.runs:
        for first in range(run.start, run.stop, ATTENTION_TILE):
            rows = slice(first, min(first + ATTENTION_TILE, run.stop))
            positions = frame.positions[rows]
            start = 0 if window is None else max(0, int(positions[0]) - window + 1)
            keys, values = run.kv.read(layer, start, int(positions[-1]) + 1)
            seen = np.arange(start, start + len(keys))
            mask = seen[None, :] <= positions[:, None]
            if window is not None:
                mask &= seen[None, :] > positions[:, None] - window
            group = heads // kv_heads
            for head in range(heads):
                columns = slice(head * head_dim, (head + 1) * head_dim)
                kv_columns = slice(head // group * head_dim, (head // group + 1) * head_dim)
                scores = q[rows, columns] @ keys[:, kv_columns].T / np.sqrt(np.float32(head_dim))
                weights = softmax(np.where(mask, scores, np.float32(-np.inf)))
                out[rows, columns] = weights @ values[:, kv_columns]


def softmax(x: Floats) -> Floats:
    """Softmax over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    total = powers.sum(axis=-1, keepdims=True)
    return np.asarray(powers / total, np.float32)


def add(frame: Frame, x: Floats, y: Floats) -> None:
    """Add y to x in place."""
    del frame
    x += y


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small), np.float32)


def silu_mul(frame: Frame, gate: Floats, up: Floats, out: Floats) -> None:
    """gate * sigmoid(gate) * up."""
    del frame
    out[:] = gate * sigmoid(gate) * up


def route(
    frame: Frame, logits: Floats, picks: Ints, weights: Floats, top_k: int, renormalise: bool
) -> None:
    """The top_k experts of each token and their softmax weights, largest first."""
    del frame
    shares = softmax(logits)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    kept = np.take_along_axis(shares, chosen, axis=1)
    if renormalise:
        kept = kept / kept.sum(axis=1, keepdims=True)
    picks.reshape(chosen.shape)[:] = chosen
    weights.reshape(chosen.shape)[:] = kept


def experts(frame: Frame, x: Floats, picks: Ints, out: Floats, layer: int) -> None:
    """Each picked expert's row, unweighted, at its router position."""
    flat = picks.reshape(-1)
    tokens = np.arange(len(flat)) // (len(flat) // len(x))
    needed = [int(index) for index in np.unique(flat)]
    frame.experts.begin_layer(layer, needed)
    for index in needed:
        rows = np.flatnonzero(flat == index)
        with frame.experts.acquire(layer, index, len(rows)) as (gate, up, down):
            given = x[tokens[rows]]
            middle = given @ gate.T
            middle = middle * sigmoid(middle) * (given @ up.T)
            out[rows] = middle @ down.T


def combine(frame: Frame, x: Floats, rows: Floats, weights: Floats, top_k: int) -> None:
    """Add the weighted rows to x, in router order."""
    del frame
    by_token = rows.reshape(len(x), top_k, -1)
    shares = weights.reshape(len(x), top_k)
    total = np.zeros_like(x)
    for k in range(top_k):
        total += shares[:, k : k + 1] * by_token[:, k]
    x += total


def gate_add(frame: Frame, x: Floats, y: Floats, gate: Floats) -> None:
    """x + sigmoid(gate) * y."""
    del frame
    x += sigmoid(gate) * y


def gather(frame: Frame, x: Floats, out: Floats) -> None:
    """The rows whose logits are wanted."""
    out[:] = x[frame.logits_rows]


KERNELS: Mapping[str, Callable[..., None]] = {
    kernel.__name__: kernel
    for kernel in (
        embed,
        rms_norm,
        linear,
        rope,
        kv_append,
        attention,
        add,
        silu_mul,
        route,
        experts,
        combine,
        gate_add,
        gather,
    )
}
"""The reference's function for every name of the kernel table."""
