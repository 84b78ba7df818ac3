"""An open pack: its tensors and blobs as views of mapped files, and the check of a blob's hash."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock

import numpy as np
from attrs import define, field, frozen

from strata_core.checkpoint.gguf_header import read_header
from strata_core.checkpoint.gguf_metadata import Metadata
from strata_core.checkpoint.mapping import MappedFile, exists, map_file, read_small
from strata_core.checkpoint.pack_format import (
    DENSE,
    ELSEWHERE,
    EXPERTS,
    JOURNAL,
    MANIFEST,
    METADATA,
    Manifest,
    PackedLayer,
    digest_of,
)
from strata_core.checkpoint.pack_manifest import read_manifest
from strata_core.checkpoint.tensor import Tensor, lasting
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError
from strata_core.interfaces import BlobLayout, Expert, Piece

PACK = "pack"
"""The form of a pack whose experts lie in experts.bin."""


@define(eq=False)
class Compared:
    """Blobs that were compared with their hashes, and those that differed. Any thread may count."""

    blobs: int = 0
    damaged: int = 0
    _lock: Lock = field(factory=Lock)

    def add(self, *, right: bool) -> None:
        """Count one."""
        with self._lock:
            self.blobs += 1
            self.damaged += not right


@frozen(eq=False, slots=False)
class PackedExperts:
    """Implements `interfaces.ExpertFiles` for a pack; a blob lies in one piece of experts.bin.

    `file` is None where a plugin keeps the experts: the ranges are then those that experts.bin at
    `path`, made absolute, would have, and nothing can be mapped. Immutable but for what `compared`
    counts; any thread may use it.
    """

    count: int
    entries: Mapping[int, PackedLayer]
    path: Path = field(converter=lasting)
    file: MappedFile | None
    compared: Compared = field(factory=Compared)

    @cached_property
    def layouts(self) -> Mapping[int, BlobLayout]:
        """Blob layout by layer."""
        return {layer: entry.layout for layer, entry in self.entries.items()}

    def blob(self, expert: Expert) -> Piece:
        """The whole blob's range. Raises CheckpointError for no such expert."""
        entry = self._entry(expert)
        return Piece(self.path, entry.start(expert.index), entry.layout.nbytes)

    def pieces(self, expert: Expert) -> tuple[Piece, Piece, Piece]:
        """The ranges of gate, up and down, which follow each other without a gap."""
        entry = self._entry(expert)
        start = entry.start(expert.index)
        gate, up, down = (
            Piece(self.path, start + part.offset, part.nbytes) for part in entry.layout.parts
        )
        return gate, up, down

    def mapped(self, expert: Expert) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read-only uint8 views of the same ranges in the mapped file; nothing is copied.

        Raises CheckpointError where a plugin keeps the experts.
        """
        file = self.file
        if file is None:
            raise CheckpointError(
                f"{expert} cannot be mapped",
                f"a plugin keeps the experts of this pack; there is no {self.path}",
                "name the plugin's own source with --source",
            )
        gate, up, down = (
            file.data[piece.offset : piece.offset + piece.nbytes] for piece in self.pieces(expert)
        )
        return gate, up, down

    def check_blob(self, expert: Expert, blob: memoryview) -> None:
        """Compare a blob, as it was read, with the hash that the pack has of it.

        `blob` holds the blob's bytes alone, in its layout. The interpreter lock is released while
        they are hashed. Raises CheckpointError naming expert, file and offset where they differ.
        """
        entry = self._entry(expert)
        right = digest_of(blob) == entry.digests[expert.index]
        self.compared.add(right=right)
        if not right:
            piece = self.blob(expert)
            raise CheckpointError(
                f"{expert} is damaged",
                f"the {piece.nbytes} bytes read from {piece.file} at offset {piece.offset} do not "
                "have the hash that the pack's manifest has of them",
                "`strata verify` lists all that is damaged; make the pack again, check the disk",
            )

    def _entry(self, expert: Expert) -> PackedLayer:
        entry = self.entries.get(expert.layer)
        if entry is None or not 0 <= expert.index < self.count:
            raise CheckpointError(
                f"there is no {expert}",
                f"the model has {self.count} experts in each of its layers {sorted(self.entries)}",
                "ask for one of those",
            )
        return entry


@frozen(eq=False)
class Pack:
    """An open pack; `files` are dense.bin and experts.bin, `gguf` the metadata it kept, if any.

    `form` is "pack", or the form in which a plugin keeps the experts; experts.bin is then missing.
    """

    manifest: Manifest
    form: str
    files: tuple[MappedFile, ...]
    tensors: Mapping[tuple[str, int | None], Tensor]
    experts: PackedExperts
    gguf: Metadata | None


def is_pack(folder: Path) -> bool:
    """Whether a folder is a pack or the unfinished beginning of one. Raises CheckpointError."""
    return exists(folder / MANIFEST) or exists(folder / JOURNAL)


def open_pack(folder: Path) -> Pack:
    """Open a finished pack: manifest read and checked, files mapped and of the right length.

    Nothing is hashed but the manifest. Raises CheckpointError naming file and field.
    """
    if not exists(folder / MANIFEST):
        raise CheckpointError(
            f"{folder} is an unfinished pack",
            f"there is a {JOURNAL} in it, but no {MANIFEST}",
            "give `strata pack` the same MODEL and OUT again, and it goes on where it stopped",
        )
    manifest = read_manifest(folder)
    dense = _map(folder / DENSE, manifest.dense_bytes)
    form = _form(folder)
    experts = _map(folder / EXPERTS, manifest.experts_bytes) if form == PACK else None
    for kept in manifest.kept:
        _map(folder / kept.name, kept.nbytes)
    has_metadata = any(kept.name == METADATA for kept in manifest.kept)
    return Pack(
        manifest,
        form,
        (dense,) if experts is None else (dense, experts),
        _tensors(manifest, dense),
        PackedExperts(
            manifest.hyper.experts,
            {i.layer: i for i in manifest.layers},
            folder / EXPERTS,
            experts,
        ),
        read_header(map_file(folder / METADATA)).metadata if has_metadata else None,
    )


def _form(folder: Path) -> str:
    """Who has the experts: "pack", or a plugin's form where it keeps them in a way of its own."""
    marker = folder / ELSEWHERE
    if exists(folder / EXPERTS) or not exists(marker):
        return PACK
    name = read_small(marker, 1024).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name) or name in (PACK, "gguf", "hub"):
        raise CheckpointError(
            f"{marker} does not name a form",
            f"{name[:40]!r}; lower-case letters, digits, '-' and '_' make a name",
            "make the pack again with the plugin that it was made with",
        )
    return name


def _tensors(manifest: Manifest, dense: MappedFile) -> dict[tuple[str, int | None], Tensor]:
    return {
        (item.role, item.layer): Tensor(
            item.name,
            TYPES[item.type],
            item.shape,
            dense.data[item.offset : item.offset + item.nbytes],
            dense.path,
            item.offset,
        )
        for item in manifest.tensors
    }


def _map(path: Path, nbytes: int) -> MappedFile:
    """A file of the pack, which must have exactly the length that the manifest names."""
    file = map_file(path)
    if file.size != nbytes:
        raise CheckpointError(
            f"{path} has the wrong length",
            f"{file.size} bytes; the pack's manifest says {nbytes}",
            "the pack is damaged or was copied in part; copy it or make it again",
        )
    return file
