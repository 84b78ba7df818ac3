"""A model's sizes from a hub folder's config.json and generation_config.json.

Field names and defaults are those of the architectures' configuration classes in transformers, in
both spellings where a newer version renamed a field.
"""

from __future__ import annotations

from typing import Literal

from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.hyper import Hyper, Rope
from strata_core.checkpoint.hyper_check import check_hyper
from strata_core.checkpoint.roles import FAMILIES, Family
from strata_core.checkpoint.shown import printable
from strata_core.errors import CheckpointError

_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "dense_ffn": ("intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "norm_eps": ("rms_norm_eps",),
    "rope.theta": ("rope_theta",),
    "rope.dim": ("partial_rotary_factor",),
    "rope.factor": ("factor",),
    "rope.original_context": ("original_max_position_embeddings",),
    "rope.beta_fast": ("beta_fast",),
    "rope.beta_slow": ("beta_slow",),
    "rope.attention_factor": ("attention_factor",),
    "sliding_window": ("sliding_window",),
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
}
_ROPE_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "finetuned",
}


def read_hub_hyper(config: Config, generation: Config | None) -> Hyper:
    """Sizes and constants of the model. Raises CheckpointError naming the file and the field."""
    family = _family(config)
    _refuse_settings(config, family)
    heads = _whole(config, "heads")
    hidden = _whole(config, "hidden")
    head_dim = _whole(config, "head_dim", hidden // max(heads, 1))
    layers = _whole(config, "layers")
    hyper = Hyper(
        family=family.hub,
        name=printable(config.text("_name_or_path", "") or config.path.parent.name or family.hub),
        layers=layers,
        hidden=hidden,
        vocabulary=_whole(config, "vocabulary"),
        context=_whole(config, "context"),
        heads=heads,
        kv_heads=_whole(config, "kv_heads", heads),
        head_dim=head_dim,
        rope=_rope(config, head_dim),
        norm_eps=config.real(*_KEYS["norm_eps"]),
        experts=_whole(config, "experts"),
        top_k=_whole(config, "top_k"),
        # OLMoE and Mixtral name the width of an expert with the field of the dense width.
        expert_ffn=_whole(
            config, "expert_ffn" if family.hub in ("qwen3_moe", "qwen2_moe") else "dense_ffn"
        ),
        dense_ffn=_whole(config, "dense_ffn", 0),
        renormalise=_renormalise(config, family),
        shared_ffn=_whole(config, "shared_ffn") if family.hub == "qwen2_moe" else 0,
        dense_layers=_dense_layers(config, family, layers),
        tied=config.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(config, family),
        bos=config.integer("bos_token_id") if config.get("bos_token_id")[0] else None,
        eos=_ends(config, generation),
    )
    return check_hyper(hyper, lambda name, why: config.bad(_key(name), why))


def wants_qkv_bias(config: Config, family: str) -> bool:
    """Whether the model has biases on q, k and v: Qwen2-MoE does unless the file says no."""
    return FAMILIES[family].qkv_bias and config.flag("qkv_bias", True)


def _whole(config: Config, name: str, default: int | None = None) -> int:
    return config.integer(*_KEYS[name], default=default)


def _key(name: str) -> str:
    return " or ".join(_KEYS[name])


def _family(config: Config) -> Family:
    kind = printable(config.text("model_type"), 60)
    known = ", ".join(FAMILIES)
    family = FAMILIES.get(kind)
    if family is not None:
        return family
    if config.get("num_experts", "num_local_experts", "n_routed_experts")[0]:
        raise CheckpointError(
            f"{config.path}: architecture {kind!r} is unknown",
            "model_type names none that Strata can compute",
            f"known architectures: {known}",
        )
    raise CheckpointError(
        f"{config.path}: {kind!r} is a dense model",
        f"model_type is {kind!r} and no field gives a number of experts",
        f"Strata runs mixtures of experts; known architectures: {known}",
    )


def _refuse_settings(config: Config, family: Family) -> None:
    """Refuse what would change the computation and is not computed."""
    _, quantisation = config.get("quantization_config", "compression_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise config.bad(
            "quantization_config",
            f"{str(method)[:40] if method else 'quantised'} hub checkpoints are not read; "
            "use the original weights, or a GGUF file",
        )
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.bad("hidden_act", f"{activation[:40]!r}; only silu is supported")
    if config.flag("attention_bias", False):
        raise config.bad("attention_bias", f"not supported for {family.hub}")
    if config.get("clip_qkv")[0]:
        raise config.bad("clip_qkv", "clipped attention inputs are not supported")


def _renormalise(config: Config, family: Family) -> bool:
    """Mixtral always makes the router weights sum to one; the others say."""
    return family.hub == "mixtral" or config.flag("norm_topk_prob", False)


def _dense_layers(config: Config, family: Family, layers: int) -> frozenset[int]:
    if family.hub not in ("qwen3_moe", "qwen2_moe"):
        return frozenset()
    step = config.integer("decoder_sparse_step", default=1)
    if step < 1:
        raise config.bad("decoder_sparse_step", f"{step}; at least 1 is possible")
    listed = set(config.integers("mlp_only_layers"))
    if any(not 0 <= i < layers for i in listed):
        raise config.bad("mlp_only_layers", f"names a layer outside the {layers} layers")
    # `layers` is not checked yet: an absurd number must not become a set of that size.
    return frozenset(i for i in range(min(layers, 1 << 16)) if i in listed or (i + 1) % step)


def _sliding_window(config: Config, family: Family) -> int | None:
    """The window of all layers; where only some layers have one, the model is refused."""
    if family.hub in ("qwen3_moe", "qwen2_moe") and not config.flag("use_sliding_window", False):
        return None
    _, window = config.get("sliding_window")
    if window is None:
        return None
    _, kinds = config.get("layer_types")
    if family.hub == "qwen2_moe" and (
        not isinstance(kinds, list) or any(kind != "sliding_attention" for kind in kinds)
    ):
        raise config.bad("use_sliding_window", "a window in some layers only is not supported")
    return config.integer("sliding_window")


def _rope(config: Config, head_dim: int) -> Rope:
    """Rope from `rope_parameters`, or `rope_theta` beside the older `rope_scaling`."""
    name = "rope_parameters" if config.get("rope_parameters")[0] else "rope_scaling"
    section = config.section(name) or Config(config.path, {})
    theta = section.real(
        "rope_theta", default=config.real("rope_theta", default=_default_theta(config))
    )
    part = section.real(
        "partial_rotary_factor", default=config.real("partial_rotary_factor", default=1.0)
    )
    if not 0.0 < part <= 1.0:
        raise config.bad("partial_rotary_factor", f"{part}; above 0 up to 1 is possible")
    dim = int(head_dim * part)
    kind = section.text("rope_type", section.text("type", "default"))
    if kind == "default":
        return Rope(theta, dim)
    if kind not in ("linear", "yarn"):
        raise config.bad(f"{name}.rope_type", f"{kind[:40]!r}; default, linear, yarn are known")
    unknown = sorted(k for k, v in section.values.items() if k not in _ROPE_KNOWN and v is not None)
    if unknown and not (unknown == ["truncate"] and section.flag("truncate", True)):
        raise config.bad(f"{name}.{unknown[0][:60]}", f"not supported for {kind} scaling")
    factor = section.real("factor")
    if kind == "linear":
        return Rope(theta, dim, "linear", factor)
    scaling: Literal["yarn"] = "yarn"
    attention = section.get("attention_factor")[0]
    return Rope(
        theta,
        dim,
        scaling,
        factor,
        section.integer("original_max_position_embeddings", default=_whole(config, "context")),
        section.real("beta_fast", default=32.0),
        section.real("beta_slow", default=1.0),
        section.real("attention_factor") if attention else None,
    )


def _default_theta(config: Config) -> float:
    return 1e6 if config.text("model_type") == "mixtral" else 10000.0


def _ends(config: Config, generation: Config | None) -> tuple[int, ...]:
    """Ids that end a text: what generation_config.json lists, else config.json."""
    listed = generation.integers("eos_token_id") if generation is not None else []
    return tuple(dict.fromkeys(listed or config.integers("eos_token_id")))
