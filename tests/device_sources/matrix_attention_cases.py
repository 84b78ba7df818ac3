"""Cases of `matrix_attention`, which has an order of its own: it is near, and rows are alone.

Two checks take the place of equal bits. `far` compares with sums in float64 of what the kernel is
given: queries as they are, keys and values as the cache holds them. `apart` computes the same
tokens again in other chunks, beside other queries and with other things behind the last position:
the bits of a token are the same in all of them (guarantee P).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attention_cases import CONTEXT
from attrs import evolve
from kernel_bench import Buffer, Case
from prompt_cases import HEAD_DIMS, prompt_attention_cases

from strata_core.kernels.device.prompt_table import ON_MATRIX_UNITS, attending
from strata_core.runtime import KernelKey

NAME = ON_MATRIX_UNITS["prompt_attention"][0]

FAR = 5e-4
"""How far a result may be: this part of the largest value that is seen."""


def matrix_attention_cases(kv: str, head_dim: int) -> Iterator[Case]:
    """The cases of `prompt_attention`, less the signs of zeros: a sum that is zero has none."""
    if attending(kv, head_dim, matrix=True) != NAME:
        return
    for case in prompt_attention_cases(kv, head_dim):
        if "signs" not in case.label:
            key = KernelKey(NAME, case.key.parameters)
            case = evolve(case, key=key, label=case.label.replace(case.key.name, NAME))
            yield case
            if case.args["tokens"] == 41:
                yield rising(case)


def rising(case: Case) -> Case:
    """The case with scores that rise from each position to the next: the first that is not seen has
    a larger one than all that are."""
    keys, buffers = case.buffers["k"].data, dict(case.buffers)
    up = ((np.arange(CONTEXT)[:, None] + 1) / 256).astype(np.float16)
    if keys.dtype == np.int8:
        buffers["k"] = Buffer(np.full_like(keys, 64))
        scales = buffers["k_scales"].data
        buffers["k_scales"] = Buffer(np.where(np.isnan(scales), scales, up / np.float16(64)))
    else:
        buffers["k"] = Buffer(np.where(np.isnan(keys), keys, up))
    buffers["q"] = Buffer(np.abs(case.buffers["q"].data))
    return evolve(case, buffers=buffers, label=f"{case.label}, rising")


def all_matrix_attention_cases() -> Iterator[Case]:
    """Both types of keys and values, every size of a head."""
    for kv in ("fp16", "int8"):
        for head_dim in HEAD_DIMS:
            yield from matrix_attention_cases(kv, head_dim)


def kept(case: Case, name: str) -> np.ndarray:
    """What the cache of a case holds for its layer: float64 [positions, KV heads, head size]."""
    data = case.buffers[name].data[1].astype(np.float64)
    if f"{name}_scales" in case.buffers:
        data *= np.repeat(case.buffers[f"{name}_scales"].data[1].astype(np.float64), 32, axis=1)
    return data.reshape(CONTEXT, int(case.args["kv_heads"]), -1)


def in_float64(case: Case) -> np.ndarray:
    """The result in float64: [tokens, heads, head size]."""
    q, positions = case.buffers["q"].data.astype(np.float64), case.buffers["positions"].data
    keys, values = kept(case, "k"), kept(case, "v")
    group, window = int(case.args["group"]), int(case.args["window"])
    out = np.zeros(q.shape)
    for token, last in enumerate(positions):
        first = max(0, last - window + 1) if window else 0
        for head in range(q.shape[1]):
            seen = keys[first : last + 1, head // group]
            scores = seen @ q[token, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[first : last + 1, head // group] / weights.sum()
    return out


def far(case: Case, out: np.ndarray) -> float:
    """The largest distance from float64, as a part of the largest value that any token sees."""
    positions, window = case.buffers["positions"].data, int(case.args["window"])
    first = max(0, int(positions[0]) - window + 1) if window else 0
    largest = np.abs(kept(case, "v")[first : int(positions[-1]) + 1]).max()
    return float(np.abs(out - in_float64(case)).max() / largest)


def piece(case: Case, first: int, end: int, rng: np.random.Generator | None = None) -> Case:
    """Tokens `first` to `end` - 1 of a case. With `rng` other queries precede and follow theirs.

    What lies behind the last position of the piece becomes something else, or is no number.
    """
    buffers, args = dict(case.buffers), dict(case.args)
    q, positions = case.buffers["q"].data, case.buffers["positions"].data
    behind = int(positions[end - 1]) + 1
    for name in ("k", "v", "k_scales", "v_scales"):
        if name in buffers and buffers[name].data.dtype != np.int8:
            data = buffers[name].data.copy()
            data[:, behind:] = np.nan
            buffers[name] = Buffer(data)
    if rng is not None:
        q = q.copy()
        q[:first] = rng.standard_normal(q[:first].shape)
        q[end:] = rng.standard_normal(q[end:].shape)
        # all tokens of the case, of which the piece's alone are compared
        buffers = dict(case.buffers)
        first, end = 0, len(q)
    count = end - first
    args["tokens"] = count
    buffers["q"] = Buffer(q[first:end].copy())
    buffers["positions"] = Buffer(positions[first:end].copy())
    buffers["places"] = Buffer(np.zeros((count, 4), np.uint64))
    buffers["out"] = Buffer(np.zeros((count, *q.shape[1:]), np.float32))
    links = [link for link in case.links if link[1] < 32 * count]
    return evolve(case, buffers=buffers, args=args, links=links)


def cuts(tokens: int, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Where pieces begin and end: single tokens, ragged ones, all but the ends."""
    yield 0, 1
    yield tokens - 1, tokens
    if tokens > 2:
        a, b = np.sort(rng.choice(np.arange(1, tokens), 2, replace=False)).tolist()
        yield from ((0, a), (a, b), (b, tokens))


def apart(case: Case, out: np.ndarray, run, rng: np.random.Generator) -> str:
    """Where a token's bits depend on the piece that it is computed in; "" where none does.

    `run(case)` gives the result of a case.
    """
    for first, end in cuts(len(out), rng):
        for others in (None, rng):
            found = run(piece(case, first, end, others))
            found = found if others is None else found[first:end]
            wrong = np.flatnonzero(found.view(np.uint32) != out[first:end].view(np.uint32))
            if wrong.size:
                beside = "alone" if others is None else "beside other queries"
                return f"tokens {first} to {end - 1} {beside}: {wrong.size} elements differ"
    return ""


def problem(case: Case, run, rng: np.random.Generator) -> str:
    """What is wrong with a case on what `run` runs it on; "" where nothing is."""
    out = run(case)
    distance = far(case, out)
    if not distance <= FAR:
        return f"{distance:.1e} of the largest value away from float64"
    return apart(case, out, run, rng)
