"""Checks on a model's sizes that hold for every form of checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from strata_core.checkpoint.hyper import Hyper
from strata_core.errors import CheckpointError

Bad = Callable[[str, str], CheckpointError]
"""Makes the error for (size, why), naming the file and that size's key in it."""

# No published model comes near these; beyond them a number is damage, and sums with it overflow.
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 30
MAX_ROPE = 1e6

_RANGES: dict[str, tuple[int, int]] = {
    "layers": (1, MAX_LAYERS),
    "hidden": (1, MAX_WIDTH),
    "vocabulary": (1, MAX_VOCABULARY),
    "context": (1, MAX_CONTEXT),
    "heads": (1, MAX_WIDTH),
    "kv_heads": (1, MAX_WIDTH),
    "head_dim": (1, MAX_WIDTH),
    "experts": (1, MAX_EXPERTS),
    "top_k": (1, MAX_EXPERTS),
    "expert_ffn": (1, MAX_WIDTH),
    "dense_ffn": (0, MAX_WIDTH),
    "shared_ffn": (0, MAX_WIDTH),
}


def check_hyper(hyper: Hyper, bad: Bad) -> Hyper:
    """`hyper` itself if its sizes are possible together; raises what `bad` makes otherwise."""
    for name, (least, most) in _RANGES.items():
        value = getattr(hyper, name)
        if not least <= value <= most:
            raise bad(name, f"{value}; {least} to {most} are possible")
    if hyper.heads % hyper.kv_heads:
        raise bad("kv_heads", f"{hyper.heads} heads are not a multiple of {hyper.kv_heads}")
    if hyper.heads * hyper.head_dim > MAX_WIDTH:
        raise bad("head_dim", f"{hyper.heads} heads of {hyper.head_dim} exceed {MAX_WIDTH}")
    if hyper.top_k > hyper.experts:
        raise bad("top_k", f"{hyper.top_k} experts asked of {hyper.experts}")
    if hyper.dense_layers and not hyper.dense_ffn:
        raise bad("dense_ffn", "there are dense layers, so their width cannot be 0")
    if not hyper.moe_layers:
        raise bad("experts", "no layer has routed experts; Strata runs mixtures of experts only")
    if not 0.0 <= hyper.norm_eps < 1.0:
        raise bad("norm_eps", f"{hyper.norm_eps}; 0 to 1 is possible")
    if hyper.sliding_window is not None and hyper.sliding_window < 1:
        raise bad("sliding_window", f"{hyper.sliding_window}; at least 1 is possible")
    for name, ids in (("bos", () if hyper.bos is None else (hyper.bos,)), ("eos", hyper.eos)):
        for token in ids:
            if not 0 <= token < hyper.vocabulary:
                raise bad(name, f"token {token} is outside the vocabulary of {hyper.vocabulary}")
    _check_rope(hyper, bad)
    return hyper


def _check_rope(hyper: Hyper, bad: Bad) -> None:
    rope = hyper.rope
    if not 1.0 < rope.theta < 1e30:
        # With a base of 1 all pairs would turn alike, and its logarithm divides in YaRN.
        raise bad("rope.theta", f"{rope.theta}; above 1 and below 10^30 is possible")
    if not 0 < rope.dim <= hyper.head_dim or rope.dim % 2:
        raise bad("rope.dim", f"{rope.dim} of a head's {hyper.head_dim} elements cannot be rotated")
    if rope.scaling == "none":
        return
    if not 1.0 <= rope.factor <= MAX_ROPE:
        raise bad("rope.factor", f"{rope.factor}; 1 to 10^6 is possible")
    if rope.scaling == "linear":
        return
    if not 0 < rope.original_context <= MAX_CONTEXT:
        raise bad("rope.original_context", f"{rope.original_context}; a trained length is needed")
    for name, turns in (("rope.beta_slow", rope.beta_slow), ("rope.beta_fast", rope.beta_fast)):
        if not 1 / MAX_ROPE <= turns <= MAX_ROPE:
            raise bad(name, f"{turns}; 10^-6 to 10^6 is possible")
    if rope.beta_fast <= rope.beta_slow:
        raise bad("rope.beta_fast", f"{rope.beta_fast} must exceed beta_slow {rope.beta_slow}")
    attention = rope.attention_factor
    if attention is not None and not 1 / MAX_ROPE <= attention <= MAX_ROPE:
        raise bad("rope.attention_factor", f"{attention}; 10^-6 to 10^6 is possible")
