"""The reference models, compared with the gguf package and the safetensors library."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.kernels.dequantise import dequantise

pytestmark = pytest.mark.shared

GGUF = ["kjv-Q8_0", "kjv-Q4_0", "kjv-Q4_K_M", "kjv-MXFP4"]
TINY = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


def all_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Stored bytes by tensor name, the experts' included."""
    found = {t.name: t.data for t in checkpoint.tensors.values()}
    for parts in checkpoint.experts.stored.values():
        for part in parts:
            for tensor in part if isinstance(part, tuple) else (part,):
                found[tensor.name] = tensor.data
    return found


@pytest.mark.parametrize("name", GGUF)
def test_gguf_tensors_are_the_oracles(models: Path, name: str) -> None:
    path = models / "kjv-moe" / f"{name}.gguf"
    ours = all_tensors(open_checkpoint(path))
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert ours.keys() == theirs.keys()
    for key, data in ours.items():
        assert np.array_equal(data, theirs[key].data.view(np.uint8).ravel())


@pytest.mark.parametrize("folder", ["kjv-moe", *(f"tiny/{name}" for name in TINY)])
def test_hub_tensors_are_the_librarys(models: Path, folder: str) -> None:
    checkpoint = open_checkpoint(models / folder)
    ours = all_tensors(checkpoint)
    seen = 0
    for file in checkpoint.files:
        # The library hands bfloat16 out as raw bytes only.
        for name, entry in safetensors.deserialize(file.read_bytes()):
            assert bytes(entry["data"]) == ours[name].tobytes()
            seen += 1
    assert seen == len(ours)
    assert checkpoint.unclaimed == ()


@pytest.mark.parametrize("folder", ["kjv-moe/kjv-Q4_K_M.gguf", "tiny/qwen2_moe"])
def test_expert_table(models: Path, folder: str) -> None:
    checkpoint = open_checkpoint(models / folder)
    table = checkpoint.experts
    hyper = checkpoint.hyper
    assert table.count == hyper.experts
    assert tuple(table.layouts) == hyper.moe_layers
    for layer in hyper.moe_layers:
        layout = table.layouts[layer]
        assert [p.name for p in layout.parts] == ["gate", "up", "down"]
        assert [(p.rows, p.columns) for p in layout.parts] == [
            (hyper.expert_ffn, hyper.hidden),
            (hyper.expert_ffn, hyper.hidden),
            (hyper.hidden, hyper.expert_ffn),
        ]
        ends = np.cumsum([p.nbytes for p in layout.parts]).tolist()
        assert [p.offset for p in layout.parts] == [0, *ends[:2]]
        assert layout.nbytes == ends[2]
        for index in (0, hyper.experts - 1):
            expert = Expert(layer, index)
            views = table.mapped(expert)
            for piece, view, part in zip(table.pieces(expert), views, layout.parts, strict=True):
                assert not view.flags.writeable
                assert piece.nbytes == part.nbytes == view.size
                with piece.file.open("rb") as file:
                    file.seek(piece.offset)
                    assert file.read(piece.nbytes) == view.tobytes()
                assert part.nbytes == TYPES[part.type].nbytes(part.rows * part.columns)
    with pytest.raises(CheckpointError, match="expert 99 of layer 0"):
        table.pieces(Expert(0, 99))
    with pytest.raises(CheckpointError, match="expert 0 of layer 99"):
        table.mapped(Expert(99, 0))


def test_forms_agree(models: Path) -> None:
    """The hub folder and the Q8_0 file of one model: same sizes, nearly the same weights."""
    hub = open_checkpoint(models / "kjv-moe")
    file = open_checkpoint(models / "kjv-moe" / "kjv-Q8_0.gguf")
    assert hub.hyper.norm_eps == pytest.approx(file.hyper.norm_eps)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "rope", "experts", "top_k"):
        assert getattr(hub.hyper, name) == getattr(file.hyper, name)
    for name in ("family", "renormalise", "tied", "eos", "bos", "vocabulary", "context"):
        assert getattr(hub.hyper, name) == getattr(file.hyper, name)
    assert hub.tensors.keys() == file.tensors.keys()
    for key, tensor in hub.tensors.items():
        ours = dequantise(tensor.type.name, tensor.data, tensor.shape)
        kind, shape, data = file.raw(*key)
        assert np.allclose(ours, dequantise(kind, data, shape), atol=np.abs(ours).max() / 100)
    for part in range(3):
        shape = hub.experts.stored[2][part][5].shape
        views = [c.experts.mapped(Expert(2, 5))[part] for c in (hub, file)]
        kinds = [c.experts.layouts[2].parts[part].type for c in (hub, file)]
        a, b = (dequantise(k, v, shape) for k, v in zip(kinds, views, strict=True))
        assert np.allclose(a, b, atol=np.abs(a).max() / 100)


def test_sizes_of_the_tiny_models(models: Path) -> None:
    hypers = {name: open_checkpoint(models / "tiny" / name).hyper for name in TINY}
    assert [h.family for h in hypers.values()] == TINY
    assert [h.renormalise for h in hypers.values()] == [True, False, False, False]
    assert [h.rope.theta for h in hypers.values()] == [1e6, 1e4, 1e4, 1e4]
    assert [h.shared_ffn for h in hypers.values()] == [0, 0, 64, 0]
    assert [h.head_dim for h in hypers.values()] == [16, 16, 16, 32]
    assert {h.expert_ffn for h in hypers.values()} == {32}
    assert {h.eos for h in hypers.values()} == {(1,)}


def test_missing_roles_and_content_identity(models: Path) -> None:
    checkpoint = open_checkpoint(models / "tiny" / "qwen3_moe")
    assert ("attn_q_norm", 0) in checkpoint.tensors
    assert ("attn_q_bias", 0) not in checkpoint.tensors
    with pytest.raises(CheckpointError, match="no attn_q_bias in layer 0") as caught:
        checkpoint.tensor("attn_q_bias", 0)
    assert "model.layers.0.self_attn.q_proj.bias" in caught.value.why
    hashes = {open_checkpoint(models / "tiny" / name).model_hash for name in TINY}
    assert len(hashes) == len(TINY)
    assert checkpoint.model_hash == open_checkpoint(models / "tiny" / "qwen3_moe").model_hash
    checkpoint.close()
    checkpoint.close()


def test_inspect_metadata(models: Path) -> None:
    shown = open_checkpoint(models / "kjv-moe" / "kjv-Q4_K_M.gguf").metadata()
    assert shown["architecture"] == "qwen3_moe"
    assert shown["types"].keys() == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    stored = sum(entry["bytes"] for entry in shown["types"].values())
    size = (models / "kjv-moe" / "kjv-Q4_K_M.gguf").stat().st_size
    assert 0 < size - stored < 200_000
    assert sum(n for by in shown["roles"].values() for n in by.values()) == stored
    assert shown["roles"]["experts_down"].keys() == {"Q5_0", "Q8_0"}
