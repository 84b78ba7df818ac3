"""GGUF models: one file, or the shards of a split one, as tensors over mapped memory.

Split files follow llama.cpp's gguf-split: names end in `-00001-of-00003.gguf`, the keys split.no
(from 0), split.count and split.tensors.count say which shard a file is, and the first one holds the
model's metadata.
"""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from strata_core.checkpoint.gguf_header import Header, read_header
from strata_core.checkpoint.gguf_metadata import Metadata
from strata_core.checkpoint.mapping import MappedFile, exists, map_file
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError

_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@frozen(eq=False)
class GgufModel:
    """A GGUF model: mapped files with their header lengths, metadata, tensors by name."""

    files: tuple[MappedFile, ...]
    header_bytes: tuple[int, ...]
    metadata: Metadata
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> GgufModel:
    """Map a GGUF file, or all shards when `path` is any shard of a split one.

    Reads the headers alone and copies no tensor. Raises CheckpointError naming file and field.
    """
    first = map_file(path)
    header = read_header(first)
    count = header.metadata.integer("split.count", 0)
    if count < 2:
        parts = [(first, header)]
    else:
        parts = [
            (first, header) if shard == path else _open_shard(shard)
            for shard in _shard_paths(path, header.metadata, count)
        ]
        _check_shards(parts, count)
    tensors: dict[str, Tensor] = {}
    for file, part in parts:
        for info in part.tensors:
            if info.name in tensors:
                raise CheckpointError(
                    f"{file.path}: tensor {printable(info.name)} is stored twice",
                    f"it is in {tensors[info.name].file.name} too",
                    "the shards do not belong together; download them again",
                )
            data = file.data[info.offset : info.offset + info.nbytes]
            tensors[info.name] = Tensor(
                info.name, info.type, info.shape, data, file.path, info.offset
            )
    return GgufModel(
        tuple(file for file, _ in parts),
        tuple(part.nbytes for _, part in parts),
        parts[0][1].metadata,
        tensors,
    )


def _open_shard(path: Path) -> tuple[MappedFile, Header]:
    file = map_file(path)
    return file, read_header(file)


def _shard_paths(path: Path, metadata: Metadata, count: int) -> list[Path]:
    match = _SHARD.match(path.name)
    if match is None or int(match["count"]) != count:
        raise metadata.bad(
            "split.count",
            f"the model has {count} shards, so the file's name must end in "
            f"-00001-of-{count:05d}.gguf; it is {path.name}",
        )
    shards = [
        path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)
    ]
    missing = [shard.name for shard in shards if not exists(shard)]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the model's {count} shards are missing",
            f"not found beside it: {', '.join(missing[:3])}{', ...' if missing[3:] else ''}",
            "put all shards of the model in one folder",
        )
    return shards


def _check_shards(parts: list[tuple[MappedFile, Header]], count: int) -> None:
    for number, (_, header) in enumerate(parts):
        metadata = header.metadata
        if metadata.integer("split.count") != count:
            raise metadata.bad("split.count", f"the other shards say {count}")
        if metadata.integer("split.no") != number:
            raise metadata.bad("split.no", f"by its name this is shard {number} (from 0)")
    first = parts[0][1].metadata
    stored = sum(len(header.tensors) for _, header in parts)
    expected = first.integer("split.tensors.count", stored)
    if stored != expected:
        raise first.bad(
            "split.tensors.count", f"{expected} tensors expected, the shards hold {stored}"
        )
