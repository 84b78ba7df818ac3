"""Hub-layout folders: config.json, safetensors files with or without an index, tokenizer files."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.mapping import MappedFile, exists, read_json
from strata_core.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096
INDEX_LIMIT = 1 << 25
"""Most bytes of an index (32 MiB: 200,000 tensors with long names)."""
_FILE_NAME = re.compile(r"^(?!\.)[^/\\\0]{1,200}$")


@frozen(eq=False)
class HubModel:
    """A hub folder: its configuration, mapped files with header lengths, tensors by name."""

    config: Config
    generation: Config | None
    files: tuple[MappedFile, ...]
    header_bytes: tuple[int, ...]
    tensors: dict[str, Tensor]


def open_hub(folder: Path) -> HubModel:
    """Map all weight files of a folder that holds config.json. Raises CheckpointError."""
    config = Config(folder / CONFIG, read_json(folder / CONFIG))
    generation = folder / GENERATION
    opened = _open_files(folder)
    tensors = {name: tensor for file in opened for name, tensor in file.tensors.items()}
    return HubModel(
        config,
        Config(generation, read_json(generation)) if exists(generation) else None,
        tuple(file.mapped for file in opened),
        tuple(file.header_bytes for file in opened),
        tensors,
    )


def _open_files(folder: Path) -> list[SafetensorsFile]:
    index = folder / INDEX
    if exists(index):
        return _open_shards(folder, index)
    if exists(folder / SINGLE):
        return [open_safetensors(folder / SINGLE)]
    raise CheckpointError(
        f"{folder} holds no weights",
        f"neither {SINGLE} nor {INDEX} is there",
        "download the model's safetensors files into the folder",
    )


def _open_shards(folder: Path, index: Path) -> list[SafetensorsFile]:
    placed = _weight_map(index)
    shards = sorted(set(placed.values()))
    missing = [name for name in shards if not exists(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the model's {len(shards)} shards are missing",
            f"{INDEX} names {', '.join(missing[:3])}{', ...' if missing[3:] else ''}",
            "download the missing files into the folder",
        )
    opened = {name: open_safetensors(folder / name) for name in shards}
    for tensor, shard in placed.items():
        if tensor not in opened[shard].tensors:
            raise CheckpointError(
                f"{folder / shard}: tensor {printable(tensor)} is missing",
                f"{INDEX} says that it is in this file",
                "the files do not belong together; download them again",
            )
    _check_once(opened)
    return list(opened.values())


def _weight_map(index: Path) -> dict[str, str]:
    """File name by tensor name, as the index says; names that leave the folder are refused."""
    config = Config(index, read_json(index, INDEX_LIMIT))
    section = config.section("weight_map")
    if section is None or not section.values:
        raise config.bad("weight_map", "the field is missing or empty")
    for tensor, shard in section.values.items():
        if not isinstance(shard, str) or not _FILE_NAME.match(shard):
            raise config.bad(
                "weight_map", f"tensor {tensor[:80]!r}: {str(shard)[:80]!r} is not a file name"
            )
    if len(set(section.values.values())) > MAX_SHARDS:
        raise config.bad("weight_map", f"names more than {MAX_SHARDS} files")
    return dict(section.values)


def _check_once(opened: dict[str, SafetensorsFile]) -> None:
    seen: dict[str, str] = {}
    for shard, file in opened.items():
        for tensor in file.tensors:
            if tensor in seen:
                raise CheckpointError(
                    f"{file.mapped.path}: tensor {printable(tensor)} is stored twice",
                    f"it is in {seen[tensor]} too",
                    "the files do not belong together; download them again",
                )
            seen[tensor] = shard
