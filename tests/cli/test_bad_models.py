"""Models that are none, through the command: exit code 2, three lines, the file named, no trace."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from strata_core.testing.tiny import write_tiny_gguf

Change = Callable[[bytearray], None]


def put(layout: str, offset: int, value: int) -> Change:
    def change(data: bytearray) -> None:
        struct.pack_into(layout, data, offset, value)

    return change


def of_tensor(name: str, field: str, value: int) -> Change:
    """Change a field of a tensor's description: dimensions, type or offset follow its name."""

    def change(data: bytearray) -> None:
        text = name.encode()
        start = data.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)
        (dimensions,) = struct.unpack_from("<I", data, start)
        places = {
            "rows": ("<Q", start + 4 + 8 * (dimensions - 1)),
            "type": ("<I", start + 4 + 8 * dimensions),
            "offset": ("<Q", start + 8 + 8 * dimensions),
        }
        layout, place = places[field]
        struct.pack_into(layout, data, place, value)

    return change


def rename(old: bytes, new: bytes) -> Change:
    def change(data: bytearray) -> None:
        start = data.index(old)
        data[start : start + len(old)] = new

    return change


def cut(keep: float) -> Change:
    def change(data: bytearray) -> None:
        del data[int(len(data) * keep) :]

    return change


GGUF: dict[str, tuple[Change, str]] = {
    "no magic": (put("<I", 0, 0), "model.gguf"),
    "unknown version": (put("<I", 4, 9), "9"),
    "2^60 tensors": (put("<Q", 8, 2**60), "tensor"),
    "2^60 keys": (put("<Q", 16, 2**60), "model.gguf"),
    "a key of 2^60 bytes": (put("<Q", 24, 2**60), "model.gguf"),
    "nothing": (cut(0), "model.gguf"),
    "half of it": (cut(0.5), "model.gguf"),
    "the last byte missing": (cut(1 - 1e-7), "model.gguf"),
    "offset past the end": (of_tensor("output_norm.weight", "offset", 2**40), "output_norm"),
    "overlapping tensors": (of_tensor("blk.1.attn_q.weight", "offset", 0), "blk.1.attn_q.weight"),
    "unknown type": (of_tensor("blk.0.attn_q.weight", "type", 99), "99"),
    "type without kernels": (of_tensor("blk.0.attn_q.weight", "type", 16), "IQ2_XXS"),
    "wrong shape": (of_tensor("output_norm.weight", "rows", 128), "output_norm"),
    "missing tensor": (rename(b"output_norm.weight", b"output_nurm.weight"), "output_norm"),
    "unknown architecture": (rename(b"qwen3moe", b"qwen9moe"), "qwen9moe"),
    "name that is not UTF-8": (rename(b"output_norm", b"output\xff\xfeorm"), "model.gguf"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(file)
    return file.read_bytes()


def test_the_unchanged_file_runs(tiny: bytes, strata, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny)
    result = strata("generate", str(file), "--prompt-ids", "5,9,3", "-n", "2", "--ignore-eos")
    assert result.code == 0
    assert len(result.out.split()) == 2


@pytest.mark.parametrize("case", GGUF)
def test_gguf(case: str, tiny: bytes, strata, tmp_path) -> None:
    change, says = GGUF[case]
    data = bytearray(tiny)
    change(data)
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    for command in (["generate", str(file), "--prompt-ids", "1"], ["inspect", str(file)]):
        result = strata(*command)
        assert result.code == 2
        lines = result.error_lines
        assert str(file) in "\n".join(lines)
        assert says in "\n".join(lines)
    error = strata("plan", str(file), "--json").document["error"]
    assert error["type"] == "CheckpointError"
    assert all(error[line] for line in ("what", "why", "remedy"))


# --- hub folders -------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def holding(name: str, text: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).write_bytes(text)

    return change


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        body = json.loads((folder / "config.json").read_text())
        holding("config.json", json.dumps(body | changes).encode())(folder)

    return change


SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
HUB: dict[str, tuple[Callable[[Path], None], str]] = {
    "broken config": (holding("config.json", b"{"), "config.json"),
    "config that is a list": (holding("config.json", b"[]"), "config.json"),
    "config that is not UTF-8": (holding("config.json", b'{"a": "\xff"}'), "config.json"),
    "no config": (without("config.json"), "config.json"),
    "broken index": (holding(INDEX, b"nothing"), INDEX),
    "missing shard": (without(SHARD), SHARD),
    "empty shard": (holding(SHARD, b""), SHARD),
    "broken tokenizer": (holding("tokenizer.json", b"{}"), "tokenizer.json"),
    "unknown architecture": (config(model_type="gpt9", architectures=["G9"]), "gpt9"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers"),
    "more asked than there are": (config(num_experts_per_tok=33), "num_experts_per_tok"),
    "wrong width": (config(hidden_size=512), "512"),
}


@pytest.mark.shared
@pytest.mark.parametrize("case", HUB)
def test_hub_folder(case: str, models: Path, strata, tmp_path) -> None:
    change, says = HUB[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (models / "kjv-moe").iterdir():
        if file.suffix in (".safetensors", ".json") and not file.name.startswith("reference"):
            (folder / file.name).symlink_to(file)
    change(folder)
    result = strata("generate", str(folder), "x", "-n", "1")
    assert result.code == 2
    assert says in "\n".join(result.error_lines)
    assert str(folder) in "\n".join(result.error_lines)


def test_folder_without_a_model(strata, tmp_path) -> None:
    result = strata("generate", str(tmp_path), "x")
    assert result.code == 2
    assert str(tmp_path) in result.error_lines[0]
