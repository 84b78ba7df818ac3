"""Tiny checkpoints with random weights, valid in every detail, for tests of any part.

Needs the `test` extra: GGUF files are written by the gguf package, so that a reader is tested
against another implementation's writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from strata_core.checkpoint.hyper import Hyper, Rope
from strata_core.checkpoint.roles import EXPERT_ROLES, FAMILIES, ROLES, RoleSpec, dense_roles, names
from strata_core.checkpoint.types import TYPES
from strata_core.kernels.dequantise import dequantise

# Byte offsets of a block's float16 scale and of its second one, and the second as a multiple of
# the first that centres random weights on zero.
_SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q8_0": (0, None, 0.0),
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
}


def tiny_hyper(**changes: Any) -> Hyper:
    """Sizes of a small Qwen3-MoE model whose rows are wide enough for every weight type."""
    base = Hyper(
        family="qwen3_moe",
        name="tiny",
        layers=2,
        hidden=256,
        vocabulary=320,
        context=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
        rope=Rope(10000.0, 64),
        norm_eps=1e-6,
        experts=8,
        top_k=2,
        expert_ffn=256,
        dense_ffn=256,
        renormalise=True,
        bos=256,
        eos=(256,),
    )
    return evolve(base, **changes)


def write_tiny_gguf(
    path: Path,
    *,
    hyper: Hyper | None = None,
    dense_type: str = "Q8_0",
    expert_type: str = "Q4_K",
    tokenizer: bool = False,
    metadata: Mapping[str, Any] | None = None,
    shard_tensors: int = 0,
    seed: int = 0,
) -> Hyper:
    """Write a GGUF model and return its sizes.

    `tokenizer` adds a byte-level vocabulary (ids 0-255 are the bytes in GPT-2's order, 256 is
    <|endoftext|>); otherwise the model has none. `metadata` replaces or adds keys; None drops one.
    `shard_tensors` splits the model into shards of so many tensors, named after `path`.
    """
    import gguf

    hyper = hyper or tiny_hyper()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, FAMILIES[hyper.family].gguf, split_max_tensors=shard_tensors)
    entries = {**_entries(hyper, tokenizer), **(metadata or {})}
    for key, value in entries.items():
        _add_entry(writer, key, value)
    for spec, name, shape in _stored(hyper, "gguf"):
        kind = "F32" if spec.vector or spec.role == "router" else dense_type
        kind = expert_type if spec.role in EXPERT_ROLES else kind
        data = _weights(rng, spec, kind, shape)
        row = TYPES[kind].nbytes(shape[-1])
        raw = data.view(np.uint8).reshape(*shape[:-1], row)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hyper


def write_tiny_hub(
    folder: Path,
    *,
    hyper: Hyper | None = None,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    seed: int = 0,
) -> Hyper:
    """Write a hub-layout folder with float32 weights and return the model's sizes.

    `config` replaces or adds fields of config.json; None drops one.
    """
    from safetensors.numpy import save_file

    hyper = hyper or tiny_hyper()
    rng = np.random.default_rng(seed)
    tensors = {
        name: _weights(rng, spec, "F32", shape).view(np.float32).reshape(shape)
        for spec, name, shape in _stored(hyper, "hub")
    }
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**_config(hyper), **(config or {})}
    kept = {key: value for key, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=1))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return hyper
    placed: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file)
        placed.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return hyper


def _stored(hyper: Hyper, form: str) -> Iterator[tuple[RoleSpec, str, tuple[int, ...]]]:
    """(role, name, shape) of every tensor of the model in a form."""
    family = FAMILIES[hyper.family]
    pick = 1 if hyper.family == "mixtral" else 0
    for spec, layer in dense_roles(hyper, qkv_bias=family.qkv_bias):
        yield spec, names(spec, form, layer)[pick if len(spec.hub) > 1 else 0], spec.shape(hyper)
    for layer in hyper.moe_layers:
        for spec in (ROLES[role] for role in EXPERT_ROLES):
            one = spec.shape(hyper)
            if form == "gguf":
                yield spec, names(spec, form, layer)[0], (hyper.experts, *one)
                continue
            for expert in range(hyper.experts):
                yield spec, names(spec, form, layer, expert)[pick], one


def _weights(
    rng: np.random.Generator, spec: RoleSpec, kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Stored bytes: norms near one, small biases, matrices with a deviation of 1/sqrt(columns)."""
    if kind in ("F32", "F16", "BF16"):
        scale = 0.1 if spec.vector else shape[-1] ** -0.5
        values = rng.normal(0.0, scale, shape).astype(np.float32)
        if spec.role.endswith("norm"):
            values += 1.0
        if kind == "F16":
            return values.astype(np.float16).view(np.uint8).ravel()
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel()
        return values.view(np.uint8).ravel()
    return random_blocks(rng, kind, prod(shape), shape[-1] ** -0.5)


def random_blocks(
    rng: np.random.Generator, kind: str, elements: int, deviation: float
) -> np.ndarray:
    """Random weights of a quantised type, uint8, centred, of about the given deviation."""
    size = TYPES[kind].block_bytes
    blocks = rng.integers(0, 256, (elements // TYPES[kind].block, size), np.uint8)
    if kind == "MXFP4":
        # The 4-bit values doubled deviate by 5.6; the scale is a power of two.
        blocks[:, 0] = round(127 + float(np.log2(deviation / 2.8)))
        return blocks.ravel()
    at, second, ratio = _SCALES[kind]

    def set_scale(value: float) -> None:
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        if second is not None:
            blocks[:, second : second + 2] = np.array([value * ratio], np.float16).view(np.uint8)

    set_scale(1.0)
    sample = blocks[:64].ravel()
    spread = dequantise(kind, sample, (len(sample) // size * TYPES[kind].block,)).std()
    set_scale(deviation / float(spread))
    return blocks.ravel()


def _entries(hyper: Hyper, tokenizer: bool) -> dict[str, Any]:
    arch = FAMILIES[hyper.family].gguf
    sizes: dict[str, Any] = {
        "block_count": hyper.layers,
        "context_length": hyper.context,
        "embedding_length": hyper.hidden,
        "feed_forward_length": hyper.dense_ffn,
        "attention.head_count": hyper.heads,
        "attention.head_count_kv": hyper.kv_heads,
        "attention.key_length": hyper.head_dim,
        "attention.value_length": hyper.head_dim,
        "attention.layer_norm_rms_epsilon": hyper.norm_eps,
        "rope.freq_base": hyper.rope.theta,
        "rope.dimension_count": hyper.rope.dim,
        "expert_count": hyper.experts,
        "expert_used_count": hyper.top_k,
        "expert_feed_forward_length": hyper.expert_ffn,
        "vocab_size": hyper.vocabulary,
    }
    if hyper.shared_ffn:
        sizes["expert_shared_feed_forward_length"] = hyper.shared_ffn
    entries = {"general.name": hyper.name, **{f"{arch}.{k}": v for k, v in sizes.items()}}
    own = "tokenizer.ggml."
    if not tokenizer:
        return {**entries, f"{own}model": "none"}
    characters = _byte_characters()
    rest = [f"[unused{i}]" for i in range(257, hyper.vocabulary)]
    return {
        **entries,
        f"{own}model": "gpt2",
        f"{own}pre": "gpt-2",
        f"{own}tokens": [*characters, "<|endoftext|>", *rest],
        f"{own}token_type": [1] * 256 + [3] + [5] * len(rest),
        f"{own}merges": [],
        f"{own}bos_token_id": 256,
        f"{own}eos_token_id": 256,
        f"{own}add_bos_token": False,
    }


def _byte_characters() -> list[str]:
    """The stand-ins of GPT-2's vocabulary for the bytes, in byte order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def _add_entry(writer: Any, key: str, value: Any) -> None:
    if value is None or (isinstance(value, list) and not value):
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_uint64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _config(hyper: Hyper) -> dict[str, Any]:
    narrow = hyper.family in ("olmoe", "mixtral")
    return {
        "model_type": hyper.family,
        "num_hidden_layers": hyper.layers,
        "hidden_size": hyper.hidden,
        "vocab_size": hyper.vocabulary,
        "max_position_embeddings": hyper.context,
        "num_attention_heads": hyper.heads,
        "num_key_value_heads": hyper.kv_heads,
        "head_dim": hyper.head_dim,
        "num_experts": hyper.experts,
        "num_experts_per_tok": hyper.top_k,
        "intermediate_size": hyper.expert_ffn if narrow else hyper.dense_ffn,
        "moe_intermediate_size": None if narrow else hyper.expert_ffn,
        "shared_expert_intermediate_size": hyper.shared_ffn or None,
        "mlp_only_layers": sorted(hyper.dense_layers),
        "norm_topk_prob": hyper.renormalise,
        "rms_norm_eps": hyper.norm_eps,
        "rope_theta": hyper.rope.theta,
        "tie_word_embeddings": hyper.tied,
        "bos_token_id": hyper.bos,
        "eos_token_id": list(hyper.eos),
    }
