"""What buffers ahead of the device are worth to a prompt's chunk: arithmetic, no device is used.

    python tests/device/ahead.py

Two streams, as `kernels/device/prompt_bring.py` orders them: a wave's copies wait until its part
of the ring is free, its launches until the part is filled. The shape is 30B-A3B's in Q4_K (48
layers of 128 experts of 2.64 MiB, a link of 52 GB/s), the operations those of `predict.py`: 0.264 s
a chunk of 4096 tokens, of which experts take 3.5 of 5.5 ms a layer.
"""

from __future__ import annotations

from collections.abc import Callable

from strata_core.kernels.device.prompt_waves import Ring
from strata_core.plan.lending import lendable, own_buffers, wanted_buffers

LAYERS, EXPERTS, TOKENS = 48, 128, 4096
COPY_S = 2.64 * 2**20 / 52e9
DENSE_S, EXPERT_S = 2.0e-3 / TOKENS, 3.5e-3 / TOKENS / EXPERTS

PLACES: dict[str, Callable[[int], int]] = {
    "none in VRAM": lambda layer: EXPERTS,
    "a quarter": lambda layer: 96,
    "half": lambda layer: 64,
    "half, whole layers": lambda layer: EXPERTS * (layer % 4 < 2),
}


def over_the_bound(tokens: int, outside: Callable[[int], int], buffers: int) -> float:
    """A chunk's time over the longer of all copies and all operations."""
    ring = Ring.of(range(buffers))
    free = [0.0] * len(ring.parts)
    copied = computed = busy = moved = 0.0
    turn = 0
    for layer in range(LAYERS):
        left = outside(layer)
        took = tokens * (DENSE_S + EXPERT_S * (EXPERTS - left))
        computed, busy = computed + took, busy + took
        while left:
            count = min(left, len(ring.parts[turn]))
            copied, moved = max(copied, free[turn]) + count * COPY_S, moved + count * COPY_S
            took = tokens * EXPERT_S * count
            computed, busy = max(computed, copied) + took, busy + took
            free[turn], left = computed, left - count
            turn = (turn + 1) % len(ring.parts)
    return computed / max(busy, moved)


def main() -> None:
    """Print the table of docs/experiments.md, 9."""
    sizes = (16, 32, 64, 96, 128, 160, 272)
    print("| tokens | experts |", " | ".join(map(str, sizes)), "| taken |")
    total = LAYERS * EXPERTS
    for tokens in (2048, 4096, 8192):
        for name, outside in PLACES.items():
            cached = total - sum(map(outside, range(LAYERS)))
            wanted = wanted_buffers(total - cached, LAYERS)
            taken = lendable(cached, total, LAYERS) or own_buffers(cached, EXPERTS, LAYERS, wanted)
            ratios = [f"{over_the_bound(tokens, outside, n):.2f}" for n in sizes]
            print(f"| {tokens} | {name} |", " | ".join(ratios), f"| {taken} |")


if __name__ == "__main__":
    main()
