"""Whole GGUF models: families, types, shards, missing and wrong tensors, absurd sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.checkpoint.roles import FAMILIES, ROLES
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

FAMILY_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"renormalise": False, "shared_ffn": 512},
    "olmoe": {"renormalise": False},
}
GGUF_ARCH = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}


@pytest.mark.parametrize("family", FAMILY_CHANGES)
def test_tensor_names_are_those_of_the_format(family: str) -> None:
    """Every hub name of the table is mapped by gguf-py's own table to the GGUF name beside it."""
    table = gguf.get_tensor_name_map(GGUF_ARCH[family], 2)
    assert gguf.MODEL_ARCH_NAMES[GGUF_ARCH[family]] == FAMILIES[family].gguf
    for spec in ROLES.values():
        if spec.where == "shared expert" and family != "qwen2_moe":
            continue
        if spec.where == "dense layer" or spec.role.endswith("_bias"):
            continue  # the format's converters know these names, its table per family does not
        if spec.role.endswith(("q_norm", "k_norm")) and family == "qwen2_moe":
            continue
        # The converters merge a layer's experts under a name without the expert's number.
        hub = spec.hub[0].format(i=1, e="").replace("experts..", "experts.")
        assert table.get_name(hub, try_suffixes=(".weight", ".bias")) == spec.gguf.format(i=1)


@pytest.mark.parametrize("family", FAMILY_CHANGES)
def test_families(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    hyper = write_tiny_gguf(path, hyper=tiny_hyper(family=family, **FAMILY_CHANGES[family]))
    checkpoint = open_checkpoint(path)
    expected = {"bos": None, "eos": (), "norm_eps": np.float32(hyper.norm_eps)}
    for name in hyper.__attrs_attrs__:
        wanted = expected.get(name.name, getattr(hyper, name.name))
        assert getattr(checkpoint.hyper, name.name) == wanted, name.name
    assert (("attn_q_bias", 1) in checkpoint.tensors) is (family == "qwen2_moe")
    assert (("attn_q_norm", 1) in checkpoint.tensors) is (family != "qwen2_moe")
    assert (("shared_gate", 1) in checkpoint.tensors) is (family == "qwen2_moe")
    if family == "olmoe":
        assert checkpoint.tensor("attn_q_norm", 0).shape == (hyper.heads * hyper.head_dim,)
        assert checkpoint.tensor("attn_k_norm", 0).shape == (hyper.kv_heads * hyper.head_dim,)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_for_experts_and_dense_weights(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, dense_type=kind, expert_type=kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensor("attn_q", 0).type.name == kind
    assert {p.type for p in checkpoint.experts.layouts[1].parts} == {kind}


def test_dense_layers_and_tied_head(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    hyper = tiny_hyper(layers=4, dense_layers=frozenset({0, 2}), dense_ffn=512, tied=True)
    write_tiny_gguf(path, hyper=hyper)
    checkpoint = open_checkpoint(path)
    assert checkpoint.hyper.dense_layers == {0, 2}
    assert checkpoint.hyper.tied
    assert tuple(checkpoint.experts.layouts) == (1, 3)
    assert checkpoint.tensor("ffn_down", 2).shape == (256, 512)
    assert ("output", None) not in checkpoint.tensors
    assert ("router", 0) not in checkpoint.tensors


def rewrite(
    source: Path,
    target: Path,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, data: data,
    extra: tuple[str, ...] = (),
) -> None:
    """Copy a model with the gguf package; `change` sees every tensor, `extra` adds vectors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data = change(tensor.name, tensor.data)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for name in extra:
        writer.add_tensor(name, np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_row_vector_may_be_stored_flat(tmp_path: Path) -> None:
    """Converters squeeze the gate of the shared expert to one dimension."""
    source, target = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(family="qwen2_moe", shared_ffn=256, renormalise=False))
    rewrite(source, target, lambda name, d: d.ravel() if "gate_inp_shexp" in name else d)
    flat = {t.name: t.shape.tolist() for t in gguf.GGUFReader(target).tensors}
    assert len(flat["blk.0.ffn_gate_inp_shexp.weight"]) == 1
    assert open_checkpoint(target).tensor("shared_router", 0).shape == (1, 256)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_split_files(tmp_path: Path, given: int) -> None:
    whole = tmp_path / "whole.gguf"
    write_tiny_gguf(whole)
    write_tiny_gguf(tmp_path / "m.gguf", shard_tensors=10)
    shards = sorted(tmp_path.glob("m-*.gguf"))
    assert len(shards) == 3
    split, single = open_checkpoint(shards[given]), open_checkpoint(whole)
    assert split.files == tuple(shards)
    assert split.hyper == single.hyper
    assert split.tensors.keys() == single.tensors.keys()
    for key, tensor in split.tensors.items():
        assert np.array_equal(tensor.data, single.tensors[key].data)
        assert tensor.file in shards
    expert = Expert(1, 7)
    for ours, theirs in zip(
        split.experts.mapped(expert), single.experts.mapped(expert), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert open_checkpoint(shards[0]).model_hash == split.model_hash != single.model_hash


def test_split_files_that_do_not_fit(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", shard_tensors=10)
    first, second, third = sorted(tmp_path.glob("m-*.gguf"))
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count") as caught:
        open_checkpoint(tmp_path / "renamed.gguf")
    assert "-00001-of-00003" in caught.value.why
    kept = third.read_bytes()
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=r"split\.no"):
        open_checkpoint(first)
    third.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match="00003-of-00003"):
        open_checkpoint(first)
    third.unlink()
    with pytest.raises(CheckpointError, match="1 of the model's 3 shards") as caught:
        open_checkpoint(second)
    assert third.name in caught.value.why


KEY = "qwen3moe."
# (key, value, what the error must name: the key's last word unless given)
ABSURD: list[tuple[str, Any, str]] = [
    ("block_count", 0, ""),
    ("block_count", 1 << 40, ""),
    ("block_count", 3, "blk.2.attn_norm.weight"),
    ("block_count", "two", ""),
    ("block_count", None, ""),
    ("embedding_length", 1 << 40, ""),
    ("embedding_length", 128, "token_embd.weight"),
    ("attention.head_count", 0, ""),
    ("attention.head_count_kv", 3, ""),
    ("attention.head_count_kv", 0, ""),
    ("attention.key_length", 63, "value_length"),
    ("attention.value_length", 32, ""),
    ("expert_count", 0, ""),
    ("expert_count", 9, "ffn_gate_inp.weight"),
    ("expert_count", 1 << 33, ""),
    ("expert_used_count", 9, ""),
    ("expert_used_count", 0, ""),
    ("expert_feed_forward_length", 128, "ffn_gate_exps.weight"),
    ("expert_feed_forward_length", None, ""),
    ("vocab_size", 1 << 50, ""),
    ("vocab_size", 319, "token_embd.weight"),
    ("context_length", 0, ""),
    ("attention.layer_norm_rms_epsilon", float("nan"), ""),
    ("attention.layer_norm_rms_epsilon", -1.0, ""),
    ("attention.layer_norm_rms_epsilon", None, ""),
    ("rope.freq_base", float("inf"), ""),
    ("rope.freq_base", 0.0, ""),
    ("rope.freq_base", 1.0, ""),
    ("rope.freq_base", 0.5, ""),
    ("rope.dimension_count", 63, ""),
    ("rope.dimension_count", 128, ""),
    ("rope.scaling.type", "longrope", ""),
    ("expert_gating_func", 2, ""),
    ("attention.sliding_window", 4096, ""),
    ("expert_group_count", 8, ""),
]


@pytest.mark.parametrize(("key", "value", "named"), ABSURD)
def test_absurd_sizes(tmp_path: Path, key: str, value: Any, named: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata={KEY + key: value})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.what
    assert (named or KEY + key) in caught.value.what
    assert caught.value.why


def test_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    scaling = KEY + "rope.scaling."
    write_tiny_gguf(path, metadata={scaling + "type": "linear", scaling + "factor": 4.0})
    assert (open_checkpoint(path).hyper.rope.scaling, open_checkpoint(path).hyper.rope.factor) == (
        "linear",
        4.0,
    )
    yarn = {
        scaling + "type": "yarn",
        scaling + "factor": 4.0,
        scaling + "original_context_length": 128,
    }
    write_tiny_gguf(path, metadata=yarn)
    rope = open_checkpoint(path).hyper.rope
    assert (rope.scaling, rope.factor, rope.original_context) == ("yarn", 4.0, 128)
    assert rope.attention_factor is None


def test_renormalisation_key(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert write_tiny_gguf(path).renormalise
    assert open_checkpoint(path).hyper.renormalise
    write_tiny_gguf(path, metadata={KEY + "expert_weights_norm": False})
    assert not open_checkpoint(path).hyper.renormalise


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt-x"}, "dense"),
        ({"general.architecture": "deepseek2", "deepseek2.expert_count": 8}, "unknown"),
        ({"general.architecture": "qwen3"}, "'qwen3' is a dense model"),
        ({"general.architecture": "llama", "llama.expert_count": 8}, "Mixtral"),
        ({"general.architecture": "llama"}, "'llama' is a dense model"),
    ],
)
def test_architectures(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    writer.add_tensor("t", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "Mixtral" in message or "qwen3moe" in caught.value.remedy


def rename(path: Path, old: str, new: str) -> None:
    assert len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    "name",
    [
        "output_norm.weight",
        "token_embd.weight",
        "blk.1.attn_q.weight",
        "blk.0.attn_k_norm.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.ffn_down_exps.weight",
    ],
)
def test_missing_tensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    rename(path, name, "x" + name[1:])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        open_checkpoint(path)
    assert "is missing" in caught.value.what


def test_tensors_without_a_role(tmp_path: Path) -> None:
    """Outside the layers they are listed; inside one, or a rope table, they would change text."""
    path = tmp_path / "m.gguf"
    hyper = tiny_hyper(tied=True)

    write_tiny_gguf(path, hyper=hyper)

    def with_extra(name: str) -> None:
        rewrite(path, tmp_path / "n.gguf", extra=(name,))

    with_extra("blk.2.nextn.eh_proj.weight")
    assert open_checkpoint(tmp_path / "n.gguf").unclaimed == ("blk.2.nextn.eh_proj.weight",)
    for name in ("blk.1.attn_q.bias", "rope_freqs.weight", "blk.0.exp_probs_b.bias"):
        with_extra(name)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
            open_checkpoint(tmp_path / "n.gguf")
        assert "has no role" in caught.value.what


def test_a_norm_must_be_stored_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    content = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    assert content[at : at + 4] == b"\0\0\0\0"
    content[at] = 2
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has the type Q4_0"):
        open_checkpoint(path)
