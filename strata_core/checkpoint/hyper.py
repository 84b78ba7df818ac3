"""The sizes and constants of a model, the same record from every form of checkpoint."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class Rope:
    """Rotary position embedding: `theta`, the rotated part of a head, and how it is stretched.

    `scaling` "none" needs nothing else; "linear" divides positions by `factor`; "yarn" also uses
    the other fields (Peng et al. 2023, "YaRN").
    """

    theta: float
    dim: int
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@frozen(kw_only=True)
class Hyper:
    """What a family file and the planner need to know of a model.

    `family` names the architecture as the hub spells it (qwen3_moe). `dense_layers` are the
    layers whose feed-forward is one dense block of width `dense_ffn`; the others have `experts`
    routed experts of width `expert_ffn`, of which `top_k` are asked for each token, their weights
    renormalised to sum to one where `renormalise`. `shared_ffn` is the width of an expert that
    every token asks (0: none). `context` is the trained length in tokens. `eos` holds every id
    that ends a text.
    """

    family: str
    name: str
    layers: int
    hidden: int
    vocabulary: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    experts: int
    top_k: int
    expert_ffn: int
    dense_ffn: int
    renormalise: bool
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    tied: bool = False
    sliding_window: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(i for i in range(self.layers) if i not in self.dense_layers)
