"""The one table of tensors: role, its name in GGUF files and hub folders, the shape it must have.

GGUF names are those of gguf-py's tensor table, hub names those of the architectures' transformers
classes. `{i}` stands for the layer, `{e}` for the expert; a hub name without `{e}` in an expert
role does not occur: hub folders store each expert by itself, GGUF files stack them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from attrs import frozen

from strata_core.checkpoint.hyper import Hyper

Where = Literal["model", "layer", "dense layer", "moe layer", "shared expert", "expert"]
Shape = Callable[[Hyper], tuple[int, ...]]


@frozen
class Family:
    """An architecture Strata knows: its hub and GGUF names and the optional parts it has.

    `qk_norm` is None, "head" (one norm for each head) or "row" (one over all heads together);
    `qkv_bias` says whether a model may bias its projections.
    """

    hub: str
    gguf: str
    qk_norm: Literal["head", "row"] | None = None
    qkv_bias: bool = False


FAMILIES: dict[str, Family] = {
    family.hub: family
    for family in (
        Family("qwen3_moe", "qwen3moe", qk_norm="head"),
        Family("qwen2_moe", "qwen2moe", qkv_bias=True),
        Family("olmoe", "olmoe", qk_norm="row"),
        Family("mixtral", "llama"),
    )
}
BY_GGUF_NAME: dict[str, Family] = {family.gguf: family for family in FAMILIES.values()}


@frozen
class RoleSpec:
    """One row of the table. `vector` tensors (norms, biases) must be stored as floats."""

    role: str
    where: Where
    gguf: str
    hub: tuple[str, ...]
    shape: Shape
    vector: bool = False


def _q(h: Hyper) -> int:
    return h.heads * h.head_dim


def _kv(h: Hyper) -> int:
    return h.kv_heads * h.head_dim


def _norm_width(heads: Callable[[Hyper], int]) -> Shape:
    return lambda h: (heads(h) if FAMILIES[h.family].qk_norm == "row" else h.head_dim,)


_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
_MIXTRAL = _LAYER + "block_sparse_moe."


def _expert(role: str, gguf: str, hub: str, mixtral: str, shape: Shape) -> RoleSpec:
    names = (f"{_MLP}experts.{{e}}.{hub}.weight", f"{_MIXTRAL}experts.{{e}}.{mixtral}.weight")
    return RoleSpec(role, "expert", f"blk.{{i}}.{gguf}.weight", names, shape)


def _layer(role: str, gguf: str, hub: str, shape: Shape, *, vector: bool = False) -> RoleSpec:
    return RoleSpec(role, "layer", f"blk.{{i}}.{gguf}", (_LAYER + hub,), shape, vector)


def _mlp(role: str, where: Where, gguf: str, hub: str, shape: Shape) -> RoleSpec:
    return RoleSpec(role, where, f"blk.{{i}}.{gguf}.weight", (f"{_MLP}{hub}.weight",), shape)


_ATTN = "self_attn."

ROLES: dict[str, RoleSpec] = {
    spec.role: spec
    for spec in (
        RoleSpec(
            "token_embedding",
            "model",
            "token_embd.weight",
            ("model.embed_tokens.weight",),
            lambda h: (h.vocabulary, h.hidden),
        ),
        RoleSpec(
            "output_norm",
            "model",
            "output_norm.weight",
            ("model.norm.weight",),
            lambda h: (h.hidden,),
            vector=True,
        ),
        RoleSpec(
            "output",
            "model",
            "output.weight",
            ("lm_head.weight",),
            lambda h: (h.vocabulary, h.hidden),
        ),
        _layer(
            "attn_norm",
            "attn_norm.weight",
            "input_layernorm.weight",
            lambda h: (h.hidden,),
            vector=True,
        ),
        _layer("attn_q", "attn_q.weight", _ATTN + "q_proj.weight", lambda h: (_q(h), h.hidden)),
        _layer("attn_k", "attn_k.weight", _ATTN + "k_proj.weight", lambda h: (_kv(h), h.hidden)),
        _layer("attn_v", "attn_v.weight", _ATTN + "v_proj.weight", lambda h: (_kv(h), h.hidden)),
        _layer(
            "attn_output",
            "attn_output.weight",
            _ATTN + "o_proj.weight",
            lambda h: (h.hidden, _q(h)),
        ),
        _layer(
            "attn_q_bias", "attn_q.bias", _ATTN + "q_proj.bias", lambda h: (_q(h),), vector=True
        ),
        _layer(
            "attn_k_bias", "attn_k.bias", _ATTN + "k_proj.bias", lambda h: (_kv(h),), vector=True
        ),
        _layer(
            "attn_v_bias", "attn_v.bias", _ATTN + "v_proj.bias", lambda h: (_kv(h),), vector=True
        ),
        _layer(
            "attn_q_norm",
            "attn_q_norm.weight",
            _ATTN + "q_norm.weight",
            _norm_width(_q),
            vector=True,
        ),
        _layer(
            "attn_k_norm",
            "attn_k_norm.weight",
            _ATTN + "k_norm.weight",
            _norm_width(_kv),
            vector=True,
        ),
        _layer(
            "ffn_norm",
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            lambda h: (h.hidden,),
            vector=True,
        ),
        RoleSpec(
            "router",
            "moe layer",
            "blk.{i}.ffn_gate_inp.weight",
            (_MLP + "gate.weight", _MIXTRAL + "gate.weight"),
            lambda h: (h.experts, h.hidden),
        ),
        _mlp("ffn_gate", "dense layer", "ffn_gate", "gate_proj", lambda h: (h.dense_ffn, h.hidden)),
        _mlp("ffn_up", "dense layer", "ffn_up", "up_proj", lambda h: (h.dense_ffn, h.hidden)),
        _mlp("ffn_down", "dense layer", "ffn_down", "down_proj", lambda h: (h.hidden, h.dense_ffn)),
        _mlp(
            "shared_gate",
            "shared expert",
            "ffn_gate_shexp",
            "shared_expert.gate_proj",
            lambda h: (h.shared_ffn, h.hidden),
        ),
        _mlp(
            "shared_up",
            "shared expert",
            "ffn_up_shexp",
            "shared_expert.up_proj",
            lambda h: (h.shared_ffn, h.hidden),
        ),
        _mlp(
            "shared_down",
            "shared expert",
            "ffn_down_shexp",
            "shared_expert.down_proj",
            lambda h: (h.hidden, h.shared_ffn),
        ),
        _mlp(
            "shared_router",
            "shared expert",
            "ffn_gate_inp_shexp",
            "shared_expert_gate",
            lambda h: (1, h.hidden),
        ),
        _expert(
            "experts_gate", "ffn_gate_exps", "gate_proj", "w1", lambda h: (h.expert_ffn, h.hidden)
        ),
        _expert("experts_up", "ffn_up_exps", "up_proj", "w3", lambda h: (h.expert_ffn, h.hidden)),
        _expert(
            "experts_down", "ffn_down_exps", "down_proj", "w2", lambda h: (h.hidden, h.expert_ffn)
        ),
    )
}
"""Every role by name. An expert role's shape is that of one expert."""

EXPERT_ROLES = ("experts_gate", "experts_up", "experts_down")
QKV_BIASES = ("attn_q_bias", "attn_k_bias", "attn_v_bias")
QK_NORMS = ("attn_q_norm", "attn_k_norm")


def dense_roles(hyper: Hyper, *, qkv_bias: bool) -> list[tuple[RoleSpec, int | None]]:
    """Every (role, layer) outside the routed experts that a model of these sizes must have."""
    family = FAMILIES[hyper.family]
    found: list[tuple[RoleSpec, int | None]] = []
    for spec in ROLES.values():
        if spec.where == "model":
            if not (spec.role == "output" and hyper.tied):
                found.append((spec, None))
            continue
        if spec.role in QKV_BIASES and not qkv_bias:
            continue
        if spec.role in QK_NORMS and family.qk_norm is None:
            continue
        found.extend((spec, layer) for layer in _layers(spec.where, hyper))
    return found


def _layers(where: Where, hyper: Hyper) -> tuple[int, ...]:
    if where == "layer":
        return tuple(range(hyper.layers))
    if where == "dense layer":
        return tuple(sorted(hyper.dense_layers))
    if where == "moe layer" or (where == "shared expert" and hyper.shared_ffn):
        return hyper.moe_layers
    return ()


def names(spec: RoleSpec, form: str, layer: int | None, expert: int | None = None) -> list[str]:
    """The names a tensor of that role may have in a checkpoint of that form ("gguf", "hub")."""
    patterns = (spec.gguf,) if form == "gguf" else spec.hub
    return [pattern.format(i=layer, e=expert) for pattern in patterns]


_IN_LAYER = re.compile(r"^(?:blk|model\.layers)\.(\d{1,6})\.")
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
_ROPE_TABLES = re.compile(r"^rope_(?:freqs|factors_long|factors_short)\.weight$")


def changes_result(name: str, hyper: Hyper) -> bool:
    """Whether a tensor that no role claims would take part in the computation if it were known.

    That is every tensor of a layer that is computed, and stored rope tables. What remains (layers
    beyond the last, as draft layers are; a stored head where the embedding is used) is left alone.
    """
    if _ROPE_TABLES.match(name):
        return True
    match = _IN_LAYER.match(name)
    return match is not None and int(match[1]) < hyper.layers and not _HARMLESS.search(name)
