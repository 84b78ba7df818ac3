"""The form of a pack: names, alignments, and what its manifest holds. docs/pack.md describes it.

A pack is a folder that `strata pack` wrote. `experts.bin` holds the blobs layer by layer, each from
a multiple of 4 KiB on, so that an unbuffered read gets one with one aligned request. `dense.bin`
holds every other weight, a section from a multiple of 4 KiB on for the model and for each layer.
Types and bytes are those of the checkpoint that it was made from. The manifest has the sizes, every
place, and the SHA-256 of every blob, tensor and kept file.
"""

from __future__ import annotations

import hashlib
import json
from math import prod
from typing import Any

from attrs import frozen

from strata_core.checkpoint.hyper import Hyper
from strata_core.checkpoint.hyper_json import hyper_to_json
from strata_core.checkpoint.types import TYPES
from strata_core.interfaces import BlobLayout

FORMAT = "strata pack"
VERSION = 1
HASH = "sha256"

MANIFEST = "strata-pack.json"
JOURNAL = "strata-pack.journal"
EXPERTS = "experts.bin"
DENSE = "dense.bin"
ELSEWHERE = "experts.form"
"""Stands in place of experts.bin where a plugin keeps the experts; holds the name of its form."""

METADATA = "metadata.gguf"
"""A GGUF file without tensors: the metadata, and so the tokenizer, of the GGUF model packed."""

KEPT = (
    METADATA,
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt"),
)
"""Names of the small files that a pack may have beside its weights, kept as they were."""

ALIGNMENT = 4096
"""Blobs and dense sections start at multiples of this, as unbuffered reads need."""

TENSOR_ALIGNMENT = 64
"""Dense tensors start at multiples of a cache line."""

MANIFEST_LIMIT = 1 << 26
"""Most bytes of a manifest (64 MiB; 50,000 experts take 4)."""


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """`offset` rounded up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


def digest_of(data: bytes | memoryview) -> str:
    """SHA-256 (hex) of bytes; the interpreter lock is released while it runs."""
    return hashlib.sha256(data).hexdigest()


@frozen
class PackedLayer:
    """The blobs of one layer: blob i is at `offset + i * stride` of experts.bin."""

    layer: int
    offset: int
    stride: int
    layout: BlobLayout
    digests: tuple[str, ...]

    def start(self, index: int) -> int:
        """Where the blob of expert `index` begins in experts.bin."""
        return self.offset + index * self.stride

    @property
    def end(self) -> int:
        """Where the last blob's last page ends."""
        return self.offset + len(self.digests) * self.stride

    def as_json(self) -> dict[str, Any]:
        """One entry of `experts.layers` in the manifest."""
        parts: dict[str, Any] = {
            part.name: {"type": part.type, "rows": part.rows, "columns": part.columns}
            for part in self.layout.parts
        }
        return {
            "layer": self.layer,
            "offset": self.offset,
            "stride": self.stride,
            **parts,
            "blobs": list(self.digests),
        }


@frozen
class PackedTensor:
    """One dense tensor in dense.bin; `layer` is None outside the layers, `name` its own name."""

    role: str
    layer: int | None
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return TYPES[self.type].nbytes(prod(self.shape))

    def as_json(self) -> dict[str, Any]:
        """One entry of `dense.tensors` in the manifest."""
        return {
            "role": self.role,
            "layer": self.layer,
            "name": self.name,
            "type": self.type,
            "shape": list(self.shape),
            "offset": self.offset,
            "hash": self.digest,
        }


@frozen
class KeptFile:
    """A small file kept as it was."""

    name: str
    nbytes: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        """One entry of `files` in the manifest."""
        return {"name": self.name, "bytes": self.nbytes, "hash": self.digest}


@frozen(kw_only=True)
class Manifest:
    """What a pack's manifest holds.

    `source_form` and `source_hash` say what it was made from (`Checkpoint.form`, `.model_hash`);
    `left_out` names tensors stored there that the model does not use and the pack does not have.
    `model_hash` is the manifest's own hash where it was read from a file.
    """

    hyper: Hyper
    layers: tuple[PackedLayer, ...]
    experts_bytes: int
    tensors: tuple[PackedTensor, ...]
    dense_bytes: int
    kept: tuple[KeptFile, ...]
    source_form: str
    source_hash: str
    left_out: tuple[str, ...]
    model_hash: str = ""

    def as_json(self) -> dict[str, Any]:
        """The manifest as it is stored, with its own hash as `model_hash`."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "hash": HASH,
            "source": {"form": self.source_form, "model_hash": self.source_hash},
            "hyper": hyper_to_json(self.hyper),
            "experts": {
                "file": EXPERTS,
                "bytes": self.experts_bytes,
                "layers": [layer.as_json() for layer in self.layers],
            },
            "dense": {
                "file": DENSE,
                "bytes": self.dense_bytes,
                "tensors": [tensor.as_json() for tensor in self.tensors],
            },
            "files": [file.as_json() for file in self.kept],
            "left_out": list(self.left_out),
        }
        return {**document, "model_hash": manifest_hash(document)}


def manifest_hash(document: dict[str, Any]) -> str:
    """The model's hash: that of the manifest without its `model_hash`, in one spelling.

    As the manifest has the hash of every stored byte, this one covers them all. Raises ValueError
    for what JSON cannot spell.
    """
    rest = {key: value for key, value in document.items() if key != "model_hash"}
    return digest_of(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
