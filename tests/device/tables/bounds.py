"""What a run could reach at best: bytes of each lane over bandwidths of the same call, operations
over the rate of the matrix units.

Of a decoded token the dense weights come first, then a layer's hits, its misses over the link and
those of the CPU at the same time (docs/experiments.md, 4 and 7). A prompt's bytes and operations
overlap as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata_core.checkpoint.hyper import Hyper
from strata_core.plan.sizes import SLOTS

GIGA, TERA = 1e9, 1e12


def items(plan: Mapping[str, Any]) -> dict[str, int]:
    """What was taken of the first device's memory, by item."""
    tiers = [tier for tier in plan["memory"] if tier["kind"] == "vram0"]
    return {item["name"]: item["actual"] or 0 for tier in tiers for item in tier["items"]}


def vram_of(plan: Mapping[str, Any]) -> int:
    """Bytes of the first device's memory that were taken by the plan."""
    return sum(items(plan).values())


def slots_of(plan: Mapping[str, Any]) -> int:
    """Bytes of the experts' slots on the first device."""
    return items(plan).get(SLOTS, 0)


def decode_bound(
    about: Mapping[str, Any],
    lanes: Mapping[str, float],
    context: int,
    tokens: int,
    rates: Mapping[str, float] | None,
    tok_s: float,
) -> dict[str, Any] | None:
    """The bound of decoding `tokens` from an empty context; `lanes` are bytes a token by lane."""
    if rates is None:
        return None
    held = items(about["plan"])
    read = held.get("dense weights", 0) + held.get("keys and values", 0) * tokens / 2 / context
    link, cpu = lanes.get("pcie", 0.0), lanes.get("cpu", 0.0)
    beside = "_beside" if link and cpu else ""
    misses = max(link / rates["link" + beside], cpu / rates["cpu" + beside])
    best = (link + cpu) / (rates["link_beside"] + rates["cpu_beside"])
    hits = lanes.get("hit", 0.0) / rates["vram"]
    seconds = (read / rates["vram"] + max(hits, misses)) / GIGA
    split = (read / rates["vram"] + max(hits, min(best, misses))) / GIGA
    if not seconds:
        return None
    return {
        "tok_s": 1 / seconds,
        "reached": tok_s * seconds,
        "reached_by_best_split": tok_s * split,
        "bytes": {"dense": read, **lanes},
    }


def operations(hyper: Hyper, tokens: int) -> tuple[float, float]:
    """Of a prompt: those of products with weights, and those of attention (its lower half)."""
    heads = hyper.heads * hyper.head_dim
    dense = hyper.hidden * (2 * heads + 2 * hyper.kv_heads * hyper.head_dim) * hyper.layers
    expert = 3 * hyper.hidden * hyper.expert_ffn * hyper.top_k * len(hyper.moe_layers)
    return 2.0 * tokens * (dense + expert), 2.0 * heads * tokens**2 * hyper.layers


def prompt_bound(
    hyper: Hyper,
    tokens: int,
    nbytes: int,
    rates: Mapping[str, float | None] | None,
    tok_s: float,
) -> dict[str, Any] | None:
    """The bound of a prompt for which `nbytes` of experts were brought over the link."""
    if rates is None or not rates["link"]:
        return None
    seconds = moved = nbytes / rates["link"] / GIGA
    computed = None
    if rates["int8_tops"] and rates["fp16_tflops"]:
        products, attention = operations(hyper, tokens)
        computed = products / rates["int8_tops"] + attention / rates["fp16_tflops"]
        computed /= TERA
        seconds = max(moved, computed)
    if not seconds:
        return None
    return {
        "tok_s": tokens / seconds,
        "reached": tok_s * seconds / tokens,
        "bytes_s": moved,
        "operations_s": computed,
    }
