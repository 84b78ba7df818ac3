"""Decode and prompt speeds of the 30B-A3B shape, predicted from bytes and measured rates.

Hit rates come from the synthetic checkpoint's own routers (Gaussian rows with log-normal norms)
over random hidden vectors; the profile is taken from other vectors than those it is tried on.
Rates are those of docs/experiments.md; every one of them can be given on the command line.

Run: python tests/device/predict.py
"""

from __future__ import annotations

import argparse
from functools import cache

import numpy as np
from lab import EXPERTS, HIDDEN, INNER, LAYERS, TOP

BLOB = 3 * HIDDEN * INNER // 256 * 144
DENSE_MACS = (5120 * HIDDEN + 4096 * HIDDEN) * LAYERS
EXPERT_MACS = 3 * HIDDEN * INNER * TOP * LAYERS
PEER = {1.0: (307, 11437), 0.5: (76, 6708), 0.25: (54, 5445), 0.0: (39, 6401)}
"""The peer's decode and prompt tokens/s by the share of experts in VRAM."""


def router(seed, layer, skew):
    """Rows of the synthetic checkpoint's router."""
    rng = np.random.default_rng((seed, layer))
    norms = np.exp(rng.normal(0, skew, (EXPERTS, 1)))
    return (rng.normal(0, 1, (EXPERTS, HIDDEN)) * norms * 2 / np.sqrt(HIDDEN)).astype(np.float32)


def picks(skew, tokens, seed=0):
    """Indices [layers, tokens, 8] of the experts that random normed vectors ask for."""
    rng = np.random.default_rng(99)
    out = np.empty((LAYERS, tokens, TOP), np.int64)
    for layer in range(LAYERS):
        x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
        logits = x @ router(seed, layer, skew).T
        out[layer] = np.argpartition(-logits, TOP, 1)[:, :TOP]
    return out


def resident(chosen, share, pool):
    """bool [layers, experts]: in VRAM, by counts of the profile; one pool, or one per layer."""
    counts = np.stack([np.bincount(c.reshape(-1), minlength=EXPERTS) for c in chosen])
    if pool == "layer":
        rank = np.argsort(np.argsort(-counts, 1), 1)
        return rank < round(share * EXPERTS)
    rank = np.argsort(np.argsort(-counts.reshape(-1), kind="stable")).reshape(counts.shape)
    return rank < round(share * counts.size)


@cache
def layer_us(misses, a):
    """Time of a layer's misses, split between the lanes as well as whole experts can be."""
    link, cpu, start_link, start_cpu = a
    times = [
        max(
            s * BLOB / link * 1e-3 + start_link * (s > 0),
            (misses - s) * BLOB / cpu * 1e-3 + start_cpu * (s < misses),
        )
        for s in range(misses + 1)
    ]
    return min(times)


def decode(hit, chosen, rates, base_ms, all_ms):
    """Milliseconds of each token: what is there without misses, and each layer's misses."""
    missing = (~np.take_along_axis(hit[:, None, :], chosen, 2)).sum(2)
    table = np.array([layer_us(m, rates) for m in range(TOP + 1)])
    rest = max(all_ms - base_ms, 0) * 1e3 / LAYERS  # hits of a layer that has no misses
    return base_ms + np.where(missing == 0, rest, np.maximum(table[missing], rest)).sum(0) * 1e-3


def prompt_s(share, tokens, link, experts, dense, attention):
    """(bytes s, operations s) of one chunk of `tokens`."""
    nbytes = (1 - share) * LAYERS * EXPERTS * BLOB
    ops = 2 * tokens * (EXPERT_MACS / experts + DENSE_MACS / dense) / 1e12
    flops = 2 * 2 * 32 * 128 * tokens**2 / 2 * LAYERS
    return nbytes / link / 1e9, ops + flops / attention / 1e12


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--link", type=float, default=48.0, help="GB/s beside the CPU lane")
    ap.add_argument(
        "--cpu", type=float, nargs=3, default=(1e-6, 65, 105), help="GB/s: none, now, at best"
    )
    ap.add_argument("--start", type=float, nargs=2, default=(8, 10), help="us of a lane's start")
    ap.add_argument("--base", type=float, default=1.75, help="ms of a round but for hits")
    ap.add_argument("--all", type=float, default=2.31, help="ms of a round of hits only")
    ap.add_argument("--int8", type=float, nargs=2, default=(84, 131), help="TOP/s experts, dense")
    ap.add_argument("--attention", type=float, default=200, help="TFLOP/s of prompt attention")
    ap.add_argument("--tokens", type=int, default=1500)
    a = ap.parse_args()
    print(
        "skew | in VRAM | hit rate, a layer's pool | hit rate, one pool | misses a token |"
        " decode tok/s link alone, lane now, lane at best | over the peer"
    )
    for skew in (0.6, 0.3, 0.0):
        chosen = picks(skew, 2 * a.tokens)
        profile, tried = chosen[:, : a.tokens], chosen[:, a.tokens :]
        for share in (1.0, 0.5, 0.25, 0.0):
            hits = {}
            for pool in ("layer", "one"):
                held = resident(profile, share, pool)
                hits[pool] = float(np.take_along_axis(held[:, None, :], tried, 2).mean())
            speeds = []
            for cpu in a.cpu:
                rates = (a.link, cpu, *a.start)
                speeds.append(1e3 / decode(held, tried, rates, a.base, a.all).mean())
            misses = (1 - hits["one"]) * LAYERS * TOP
            ratio = " - ".join(f"{s / PEER[share][0]:.2f}" for s in speeds)
            print(
                f"{skew} | {share} | {hits['layer']:.3f} | {hits['one']:.3f} | {misses:.0f} | "
                f"{', '.join(f'{s:.0f}' for s in speeds)} | {ratio}",
                flush=True,
            )
    print(
        "\ntokens | in VRAM | bytes s | operations s | tok/s at the bound | 0.7 of it | over peer"
    )
    for tokens in (4096, 16384):
        for share in (1.0, 0.5, 0.25, 0.0):
            by, ops = prompt_s(share, tokens, 51.5, *a.int8, a.attention)
            speed = tokens / max(by, ops)
            print(
                f"{tokens} | {share} | {by:.3f} | {ops:.3f} | {speed:.0f} | {0.7 * speed:.0f} | "
                f"{0.7 * speed / PEER[share][1]:.2f}"
            )


if __name__ == "__main__":
    main()
