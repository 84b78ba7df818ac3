"""A model's sizes from GGUF metadata.

Keys are those of gguf-py's constants (`{arch}.block_count` and so on). Where a key is missing, what
llama.cpp takes instead is taken here too; the comments say where that matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from attrs import frozen

from strata_core.checkpoint.gguf_metadata import Metadata
from strata_core.checkpoint.hyper import Hyper, Rope
from strata_core.checkpoint.hyper_check import check_hyper
from strata_core.checkpoint.roles import BY_GGUF_NAME, FAMILIES, Family
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError

_KEYS = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "vocabulary": "vocab_size",
    "context": "context_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "experts": "expert_count",
    "top_k": "expert_used_count",
    "expert_ffn": "expert_feed_forward_length",
    "dense_ffn": "feed_forward_length",
    "shared_ffn": "expert_shared_feed_forward_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope.theta": "rope.freq_base",
    "rope.dim": "rope.dimension_count",
    "rope.factor": "rope.scaling.factor",
    "rope.original_context": "rope.scaling.original_context_length",
    "rope.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.attention_factor": "rope.scaling.attn_factor",
    "sliding_window": "attention.sliding_window",
}
# Settings of other architectures: present and not 0 they would change the computation.
_REFUSED = (
    "attention.clamp_kqv",
    "attention.sliding_window",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "expert_group_count",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.yarn_log_multiplier",
)
_NEUTRAL = {"expert_weights_scale": (0, 1), "expert_group_count": (0, 1), "logit_scale": (0, 1)}


def read_gguf_hyper(metadata: Metadata, tensors: Mapping[str, Tensor]) -> Hyper:
    """Sizes and constants of the model; `tensors` settle what the metadata leave open.

    Those are: a separate head or none (output.weight), and which layers are dense. Raises
    CheckpointError naming the file and the key.
    """
    family = _family(metadata)
    prefix = family.gguf + "."
    _refuse_settings(metadata, prefix)
    whole = _Sizes(metadata, prefix)
    heads = whole("heads")
    hidden = whole("hidden")
    head_dim = whole("head_dim", hidden // max(heads, 1))
    value_dim = metadata.integer(prefix + "attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.bad(
            prefix + "attention.value_length",
            f"values of {value_dim} elements with keys of {head_dim} are not supported",
        )
    layers = whole("layers")
    dense_ffn = whole("dense_ffn", 0)
    top_k = whole("top_k")
    expert_ffn, shared_ffn = _widths(family, whole, dense_ffn, top_k)
    hyper = Hyper(
        family=family.hub,
        name=printable(metadata.text("general.name", metadata.file.path.stem)),
        layers=layers,
        hidden=hidden,
        vocabulary=whole("vocabulary", metadata.length("tokenizer.ggml.tokens")),
        context=whole("context"),
        heads=heads,
        kv_heads=whole("kv_heads", heads),
        head_dim=head_dim,
        rope=_rope(metadata, prefix, head_dim, whole("context")),
        norm_eps=metadata.real(prefix + _KEYS["norm_eps"]),
        experts=whole("experts"),
        top_k=top_k,
        expert_ffn=expert_ffn,
        dense_ffn=dense_ffn,
        renormalise=_renormalise(metadata, prefix, family),
        shared_ffn=shared_ffn,
        dense_layers=_dense_layers(tensors, layers),
        tied="output.weight" not in tensors,
        bos=_token(metadata, "bos"),
        eos=_ends(metadata),
    )
    return check_hyper(hyper, lambda name, why: metadata.bad(_key(prefix, name), why))


def _key(prefix: str, name: str) -> str:
    if name in ("bos", "eos"):
        return f"tokenizer.ggml.{name}_token_id"
    return prefix + _KEYS[name]


def _family(metadata: Metadata) -> Family:
    architecture = printable(metadata.text("general.architecture"), 60)
    known = ", ".join(sorted(f.gguf for f in FAMILIES.values() if f.hub != "mixtral"))
    if architecture == "llama" and metadata.integer("llama.expert_count", 0):
        # Converters interleave the rows of q and k for this architecture's other rope pairing;
        # read as they are they would give wrong text without any error.
        raise CheckpointError(
            f"{metadata.file.path}: Mixtral is not read from GGUF files",
            "these files store the rows of attn_q and attn_k in another order",
            "use the model's hub folder (config.json and safetensors files)",
        )
    family = BY_GGUF_NAME.get(architecture)
    experts = f"{architecture}.expert_count"
    if family is not None and (family.hub != "mixtral"):
        if metadata.integer(experts, 0) == 0:
            raise metadata.bad(experts, "no routed experts; Strata runs mixtures of experts only")
        return family
    if not metadata.integer(experts, 0):
        raise CheckpointError(
            f"{metadata.file.path}: {architecture!r} is a dense model",
            f"general.architecture is {architecture!r} and there is no {experts}",
            f"Strata runs mixtures of experts; known architectures: {known}",
        )
    raise CheckpointError(
        f"{metadata.file.path}: architecture {architecture!r} is unknown",
        "general.architecture names none that Strata can compute",
        f"known architectures: {known}",
    )


def _refuse_settings(metadata: Metadata, prefix: str) -> None:
    for name in _REFUSED:
        value = metadata.scalar(prefix + name)
        if value is not None and value not in _NEUTRAL.get(name, (0,)):
            raise metadata.bad(prefix + name, f"{value}; this setting is not supported")
    gating = metadata.integer(prefix + "expert_gating_func", 1)
    if gating not in (0, 1):
        raise metadata.bad(prefix + "expert_gating_func", f"{gating}; only softmax is supported")


@frozen(eq=False)
class _Sizes:
    """Whole numbers by the name of the size; the key is what an error names."""

    _metadata: Metadata
    _prefix: str

    def __call__(self, name: str, default: int | None = None) -> int:
        return self._metadata.integer(self._prefix + _KEYS[name], default)


def _widths(family: Family, whole: _Sizes, dense: int, top_k: int) -> tuple[int, int]:
    """Widths of a routed and of the shared expert, with llama.cpp's defaults."""
    if family.hub == "qwen2_moe":
        return whole("expert_ffn", dense // max(top_k, 1)), whole("shared_ffn", dense)
    # OLMoE files name the width of an expert with the key of the dense width.
    return whole("expert_ffn", dense if family.hub == "olmoe" else None), 0


def _renormalise(metadata: Metadata, prefix: str, family: Family) -> bool:
    """Whether router weights are made to sum to one; no key is written for older families."""
    return metadata.flag(prefix + "expert_weights_norm", family.hub == "qwen3_moe")


def _dense_layers(tensors: Mapping[str, Tensor], layers: int) -> frozenset[int]:
    """Layers that store a dense block and no router; no key says which these are."""
    return frozenset(
        i
        for i in range(min(layers, len(tensors)))
        if f"blk.{i}.ffn_gate.weight" in tensors and f"blk.{i}.ffn_gate_inp.weight" not in tensors
    )


def _rope(metadata: Metadata, prefix: str, head_dim: int, context: int) -> Rope:
    theta = metadata.real(prefix + _KEYS["rope.theta"], 10000.0)
    dim = metadata.integer(prefix + _KEYS["rope.dim"], head_dim)
    older = metadata.real(prefix + "rope.scale_linear", 1.0)
    kind = metadata.text(prefix + "rope.scaling.type", "none" if older == 1.0 else "linear")
    factor = metadata.real(prefix + _KEYS["rope.factor"], older)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, "linear", factor)
    if kind != "yarn":
        raise metadata.bad(prefix + "rope.scaling.type", f"{kind!r}; none, linear, yarn are known")
    own = prefix + _KEYS["rope.attention_factor"]
    # The stored factor multiplies the usual one, 1 + 0.1 ln(factor).
    attention = (
        metadata.real(own) * (1.0 + 0.1 * log(factor)) if own in metadata and factor >= 1 else None
    )
    return Rope(
        theta,
        dim,
        "yarn",
        factor,
        metadata.integer(prefix + _KEYS["rope.original_context"], context),
        metadata.real(prefix + _KEYS["rope.beta_fast"], 32.0),
        metadata.real(prefix + _KEYS["rope.beta_slow"], 1.0),
        attention,
    )


def _token(metadata: Metadata, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    value = metadata.integer(key)
    return None if value in (-1, 0xFFFFFFFF) else value


def _ends(metadata: Metadata) -> tuple[int, ...]:
    """Ids that end a text: end of sequence, of turn, of message."""
    found = (_token(metadata, name) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in found if token is not None))
