"""Hub-layout folders: both spellings, shards, broken files, refused variants."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from strata_core.checkpoint.hub import INDEX_LIMIT
from strata_core.checkpoint.hyper import Hyper, Rope
from strata_core.checkpoint.mapping import JSON_LIMIT
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"renormalise": False, "shared_ffn": 96},
    "olmoe": {"renormalise": False},
    "mixtral": {},
}


def small(**changes: Any) -> Hyper:
    sizes = {"hidden": 64, "head_dim": 16, "expert_ffn": 32, "dense_ffn": 32}
    return tiny_hyper(**{**sizes, "rope": Rope(10000.0, 16), **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    hyper = write_tiny_hub(tmp_path, hyper=small(family=family, **FAMILIES[family]))
    checkpoint = open_checkpoint(tmp_path)
    for attribute in hyper.__attrs_attrs__:
        if attribute.name != "name":
            ours = getattr(checkpoint.hyper, attribute.name)
            assert ours == getattr(hyper, attribute.name), attribute.name
    assert (("attn_q_bias", 0) in checkpoint.tensors) is (family == "qwen2_moe")
    assert checkpoint.unclaimed == ()
    assert checkpoint.form == "hub"


def test_spellings_of_newer_versions(tmp_path: Path) -> None:
    hyper = write_tiny_hub(
        tmp_path,
        hyper=small(),
        config={
            "num_experts": None,
            "num_local_experts": 8,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
            "eos_token_id": 256,
        },
    )
    ours = open_checkpoint(tmp_path).hyper
    assert ours.experts == hyper.experts
    assert ours.rope.theta == 12345.0
    assert ours.eos == (256,)


def test_generation_config_lists_the_ends(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path, hyper=small())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 7]}')
    assert open_checkpoint(tmp_path).hyper.eos == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: bad field: eos_token_id"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, ("linear", 2.0, 0, None)),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            ("yarn", 4.0, 128, None),
        ),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}, ("yarn", 4.0, 512, 1.5)),
        ({"rope_type": "default"}, ("none", 1.0, 0, None)),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], expected: Any) -> None:
    write_tiny_hub(tmp_path, hyper=small(), config={"rope_scaling": scaling})
    rope = open_checkpoint(tmp_path).hyper.rope
    assert (rope.scaling, rope.factor, rope.original_context, rope.attention_factor) == expected
    assert rope.theta == 10000.0


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"attention_factor": 1e300}, "attention_factor"),
        ({"attention_factor": 0.0}, "attention_factor"),
    ],
)
def test_yarn_that_cannot_be_computed(tmp_path: Path, rope: dict[str, Any], field: str) -> None:
    whole = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **rope}
    write_tiny_hub(tmp_path, hyper=small(), config={"rope_parameters": whole})
    with pytest.raises(CheckpointError, match=field):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", JSON_LIMIT),
        ("generation_config.json", JSON_LIMIT),
        ("model.safetensors.index.json", INDEX_LIMIT),
    ],
)
def test_json_that_would_fill_the_memory(tmp_path: Path, name: str, limit: int) -> None:
    write_tiny_hub(tmp_path, hyper=small(), shards=2)
    text = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
    (tmp_path / name).write_text(text + " " * limit)
    with pytest.raises(CheckpointError, match="too large") as caught:
        open_checkpoint(tmp_path)
    assert name in caught.value.what


def test_dense_layers(tmp_path: Path) -> None:
    hyper = small(layers=4, dense_layers=frozenset({0, 2}), dense_ffn=48)
    write_tiny_hub(tmp_path, hyper=hyper)
    assert open_checkpoint(tmp_path).hyper.dense_layers == {0, 2}
    write_tiny_hub(tmp_path, hyper=hyper, config={"mlp_only_layers": [], "decoder_sparse_step": 2})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.hyper.moe_layers == (1, 3)
    assert checkpoint.tensor("ffn_gate", 2).shape == (48, 64)


def test_tied_head_stored_beside_the_embedding(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path, hyper=small(), config={"tie_word_embeddings": True})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.hyper.tied
    assert ("output", None) not in checkpoint.tensors
    assert checkpoint.unclaimed == ("lm_head.weight",)


def test_shards(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path / "a", hyper=small())
    write_tiny_hub(tmp_path / "b", hyper=small(), shards=3)
    single, split = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert len(split.files) == 3
    for key, tensor in single.tensors.items():
        assert np.array_equal(tensor.data, split.tensors[key].data)
    shard = split.files[1]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match="1 of the model's 3 shards") as caught:
        open_checkpoint(tmp_path / "b")
    assert shard.name in caught.value.why
    shard.write_bytes(split.files[0].read_bytes())
    with pytest.raises(CheckpointError, match="is missing") as caught:
        open_checkpoint(tmp_path / "b")
    assert shard.name in caught.value.what
    shard.write_bytes(kept)
    assert open_checkpoint(tmp_path / "b").hyper == split.hyper


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "", ".", "..", "a/b", "a\\b", 7, None, "a\0b", "a" * 300],
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, name: Any) -> None:
    write_tiny_hub(tmp_path, hyper=small(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json: bad field: weight_map"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": "deepseek_v3"}, "unknown"),
        ({"model_type": "qwen3", "num_experts": None}, "'qwen3' is a dense model"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": 32}, "model.embed_tokens.weight"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": 9}, "mlp.gate.weight"),
        ({"num_experts": 7}, "mlp.gate.weight"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8, "mscale": 1}}, "rope_scaling.mscale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "partial_rotary"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0, 1]}, "num_experts or num_local_experts"),
        ({"mlp_only_layers": [5]}, "mlp_only_layers"),
        ({"mlp_only_layers": [0]}, "model.layers.0.mlp.gate_proj.weight"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"bos_token_id": 320}, "bos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ],
)
def test_refused_configurations(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    write_tiny_hub(tmp_path, hyper=small(), config=config)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in caught.value.what
    assert field in caught.value.what
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"1" * 10_000]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path: Path, content: bytes, file: str) -> None:
    write_tiny_hub(tmp_path, hyper=small())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        open_checkpoint(tmp_path)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        open_checkpoint(tmp_path)
    write_tiny_hub(tmp_path, hyper=small())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight"),
            "experts.7.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(64, np.int32)}),
            "model.norm.weight has the type I32",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(65, np.float32)}),
            "model.norm.weight has the shape [65]",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.3.up_proj.weight": np.zeros((32, 64), np.float16)}
            ),
            "experts.3.up_proj.weight has the type F16",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            "q_proj.bias has no role",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, edit: Any, message: str) -> None:
    write_tiny_hub(tmp_path, hyper=small())
    change(tmp_path, edit)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert message in caught.value.what


def test_biases_as_the_configuration_says(tmp_path: Path) -> None:
    hyper = small(family="qwen2_moe", renormalise=False, shared_ffn=96)
    write_tiny_hub(tmp_path, hyper=hyper, config={"qkv_bias": False})
    with pytest.raises(CheckpointError, match="qkv_bias"):
        open_checkpoint(tmp_path)
    write_tiny_hub(tmp_path, hyper=hyper)
    change(tmp_path, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias is missing"):
        open_checkpoint(tmp_path)


def test_half_precision_types(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path, hyper=small())
    change(tmp_path, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    checkpoint = open_checkpoint(tmp_path)
    assert {t.type.name for t in checkpoint.tensors.values()} == {"F16"}
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert checkpoint.tensor("output_norm").data.tobytes() == stored.tobytes()


@given(data=st.data())
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_damaged_safetensors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    base = tmp_path_factory.getbasetemp() / "hub-fuzz"
    if not base.exists():
        write_tiny_hub(base, hyper=small(layers=1, experts=2))
        shutil.copy(base / "model.safetensors", base / "kept")
    content = bytearray((base / "kept").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        for at in data.draw(st.lists(st.integers(0, header * 8 - 1), min_size=1, max_size=4)):
            content[at // 8] ^= 1 << at % 8
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (base / "model.safetensors").write_bytes(content)
    try:
        checkpoint = open_checkpoint(base)
    except CheckpointError:
        return
    for tensor in checkpoint.tensors.values():
        assert tensor.data.size == tensor.nbytes
