"""A pack has the checkpoint's bytes, sizes and tokens, in the form that docs/pack.md describes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.pack.workers import CHUNK
from strata_core.pack.write import write_pack
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub
from strata_core.tokenizer import open_tokenizer

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(["qwen3_moe", "qwen2_moe", "olmoe"]))
    layers = draw(st.integers(1, 3))
    dense = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    experts = draw(st.integers(1, 7))
    return {
        "family": family,
        "layers": layers,
        "dense_layers": frozenset(dense if family == "qwen3_moe" else ()),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "shared_ffn": 256 if family == "qwen2_moe" else 0,
        "vocabulary": draw(st.integers(257, 300)),
    }


def bytes_of(checkpoint: Checkpoint, expert: Expert) -> list[bytes]:
    return [
        piece.file.read_bytes()[piece.offset : piece.offset + piece.nbytes]
        for piece in checkpoint.experts.pieces(expert)
    ]


def every(checkpoint: Checkpoint) -> list[Expert]:
    count = checkpoint.experts.count
    return [Expert(layer, i) for layer in checkpoint.experts.layouts for i in range(count)]


def check_same(before: Checkpoint, after: Checkpoint) -> None:
    assert after.form == "pack"
    assert after.hyper == before.hyper
    assert after.experts.layouts == before.experts.layouts
    assert after.experts.count == before.experts.count
    assert set(after.tensors) == set(before.tensors)
    for role, layer in before.tensors:
        kind, shape, data = before.raw(role, layer)
        other_kind, other_shape, other = after.raw(role, layer)
        assert (kind, shape) == (other_kind, other_shape)
        assert np.array_equal(data, other)
        assert not other.flags.writeable
    for expert in every(before):
        raw = bytes_of(before, expert)
        assert bytes_of(after, expert) == raw
        assert [view.tobytes() for view in after.experts.mapped(expert)] == raw


def check_form(folder: Path, after: Checkpoint) -> None:
    """The promises of docs/pack.md, read from the files with json and hashlib alone."""
    manifest = json.loads((folder / "strata-pack.json").read_bytes())
    blobs = (folder / "experts.bin").read_bytes()
    dense = (folder / "dense.bin").read_bytes()
    assert (manifest["format"], manifest["version"]) == ("strata pack", 1)
    assert manifest["experts"]["bytes"] == len(blobs)
    assert len(blobs) % 4096 == 0
    assert manifest["dense"]["bytes"] == len(dense)
    assert len(dense) % 4096 == 0
    rest = np.frombuffer(blobs, np.uint8).copy()
    for layer in manifest["experts"]["layers"]:
        size = after.experts.layouts[layer["layer"]].nbytes
        for index, digest in enumerate(layer["blobs"]):
            start = layer["offset"] + index * layer["stride"]
            assert start % 4096 == 0
            assert hashlib.sha256(blobs[start : start + size]).hexdigest() == digest
            rest[start : start + size] = 0
    assert not rest.any(), "what is not a blob is zero"
    for tensor in manifest["dense"]["tensors"]:
        found = after.tensor(tensor["role"], tensor["layer"])
        assert tensor["offset"] % 64 == 0
        data = dense[tensor["offset"] : tensor["offset"] + found.nbytes]
        assert hashlib.sha256(data).hexdigest() == tensor["hash"]
    for kept in manifest["files"]:
        content = (folder / kept["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (kept["bytes"], kept["hash"])
    named = manifest.pop("model_hash")
    spelled = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert named == hashlib.sha256(spelled).hexdigest() == after.model_hash
    names = {
        "strata-pack.json",
        "experts.bin",
        "dense.bin",
        *(k["name"] for k in manifest["files"]),
    }
    assert {path.name for path in folder.iterdir()} == names


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=sizes(), kind=st.sampled_from(TYPES), other=st.sampled_from(TYPES), split=st.booleans()
)
def test_gguf(sizes: dict[str, Any], kind: str, other: str, split: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_gguf(
            folder / "m.gguf",
            hyper=tiny_hyper(**sizes),
            expert_type=kind,
            dense_type=other,
            tokenizer=True,
            shard_tensors=9 if split else 0,
        )
        before = open_checkpoint(sorted(folder.glob("*.gguf"))[0])
        write_pack(before, folder / "out", Silent())
        after = open_checkpoint(folder / "out")
        check_same(before, after)
        check_form(folder / "out", after)
        assert after.gguf is not None
        assert before.gguf is not None
        assert after.gguf.plain() == before.gguf.plain()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=sizes(),
    shards=st.integers(1, 3),
    rope=st.sampled_from(
        [None, {"rope_type": "linear", "factor": 3.7}, {"rope_type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 128, "attention_factor": 1.1}]
    ),
)  # fmt: skip
def test_hub(sizes: dict[str, Any], shards: int, rope: dict[str, Any] | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_hub(
            folder / "m",
            hyper=tiny_hyper(**sizes, norm_eps=1.1e-6),
            shards=shards,
            config={"rope_scaling": rope},
        )
        before = open_checkpoint(folder / "m")
        write_pack(before, folder / "out", Silent())
        after = open_checkpoint(folder / "out")
        check_same(before, after)
        check_form(folder / "out", after)
        assert after.config is None
        assert after.gguf is None


def test_mixtral_and_tied(tmp_path: Path) -> None:
    for name, changes in {
        "mixtral": {"family": "mixtral", "sliding_window": 128},
        "tied": {"tied": True},
    }.items():
        config = {"sliding_window": 128} if name == "mixtral" else {}
        write_tiny_hub(tmp_path / name, hyper=tiny_hyper(**changes), config=config)
        before = open_checkpoint(tmp_path / name)
        write_pack(before, tmp_path / f"{name}-pack", Silent())
        after = open_checkpoint(tmp_path / f"{name}-pack")
        check_same(before, after)
        assert ("output", None) in after.tensors or after.hyper.tied


def test_a_tensor_of_several_chunks(tmp_path: Path) -> None:
    hyper = tiny_hyper(vocabulary=9001, experts=2, layers=1)
    write_tiny_gguf(tmp_path / "m.gguf", hyper=hyper, dense_type="F32", expert_type="MXFP4")
    before = open_checkpoint(tmp_path / "m.gguf")
    assert before.tensor("token_embedding").nbytes > 2 * CHUNK
    write_pack(before, tmp_path / "out", Silent())
    check_same(before, open_checkpoint(tmp_path / "out"))


def test_the_same_model_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_pack(open_checkpoint(model), tmp_path / name, Silent())
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_prompts_and_chats_are_as_in_gguf(model: Path, packed: Path) -> None:
    before, after = (open_tokenizer(open_checkpoint(path)) for path in (model, packed))
    assert before is not None
    assert after is not None
    text = "In the beginning <|endoftext|> çé 日本 \U0001f600"
    assert after.encode(text) == before.encode(text)
    assert (after.eos, after.bos, after.special) == (before.eos, before.bos, before.special)
    messages = [{"role": "user", "content": "hello"}]
    assert after.render_chat(messages) == before.render_chat(messages) == "<hello>"


def test_the_hubs_small_files_are_kept_as_they_are(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path / "m")
    own = {
        "tokenizer_config.json": b'{"eos_token": "</s>"}',
        "chat_template.jinja": "{{ messages[0].content }} é".encode(),
        "generation_config.json": b'{"eos_token_id": [5, 7]}',
    }
    for name, content in {**own, "README.md": b"not kept"}.items():
        (tmp_path / "m" / name).write_bytes(content)
    before = open_checkpoint(tmp_path / "m")
    write_pack(before, tmp_path / "out", Silent())
    for name, content in own.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert not (tmp_path / "out" / "README.md").exists()
    assert open_checkpoint(tmp_path / "out").hyper.eos == before.hyper.eos == (5, 7)


def test_what_the_model_does_not_use_is_named(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path / "m", hyper=tiny_hyper(), config={"tie_word_embeddings": True})
    before = open_checkpoint(tmp_path / "m")
    assert before.unclaimed == ("lm_head.weight",)
    manifest = write_pack(before, tmp_path / "out", Silent()).manifest
    assert manifest.left_out == ("lm_head.weight",)


def test_an_expert_that_is_none_is_an_error(packed: Path) -> None:
    experts = open_checkpoint(packed).experts
    for expert in (Expert(0, 5), Expert(0, -1), Expert(2, 0)):
        with pytest.raises(CheckpointError, match=f"{expert.index} of layer {expert.layer}"):
            experts.pieces(expert)
        with pytest.raises(CheckpointError, match="there is no"):
            experts.mapped(expert)


def test_a_role_that_the_model_lacks_is_named(packed: Path) -> None:
    with pytest.raises(CheckpointError, match="attn_q_norm in layer 1"):
        open_checkpoint(packed).tensor("attn_q_norm", 1)
