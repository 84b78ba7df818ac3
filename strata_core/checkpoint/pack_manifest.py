"""Reading a pack's manifest, every number checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.experts import PARTS
from strata_core.checkpoint.hyper import Hyper
from strata_core.checkpoint.hyper_json import hyper_from_json
from strata_core.checkpoint.mapping import read_json
from strata_core.checkpoint.pack_format import (
    ALIGNMENT,
    DENSE,
    EXPERTS,
    FORMAT,
    HASH,
    KEPT,
    MANIFEST,
    MANIFEST_LIMIT,
    TENSOR_ALIGNMENT,
    VERSION,
    KeptFile,
    Manifest,
    PackedLayer,
    PackedTensor,
    manifest_hash,
)
from strata_core.checkpoint.roles import EXPERT_ROLES, QKV_BIASES, ROLES, RoleSpec, dense_roles
from strata_core.checkpoint.types import TYPES, WeightType
from strata_core.errors import CheckpointError
from strata_core.interfaces import BlobLayout, BlobPart

MAX_BYTES = 1 << 50
"""No file of a pack comes near a pebibyte; beyond it a number is damage."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FLOATS = ("F32", "F16", "BF16")


@frozen(eq=False)
class ManifestFields(Config):
    """The fields of one object of the manifest."""

    def bad(self, key: str, why: str) -> CheckpointError:
        """The error for a field that cannot be used."""
        return CheckpointError(
            f"{self.path}: bad field: {key}",
            why,
            "the pack is damaged or was made for another version; make it again with `strata pack`",
        )

    def part(self, key: str) -> ManifestFields:
        """A nested object, which must be there."""
        found = self.section(key)
        if found is None:
            raise self.bad(key, "the field is missing")
        return found

    def list(self, key: str) -> list[Any]:
        """A list, which must be there."""
        _, value = self.get(key)
        if not isinstance(value, list):
            raise self.bad(key, "a list is expected")
        return list(value)

    def objects(self, key: str) -> Iterator[ManifestFields]:
        """The objects of a list."""
        for index, item in enumerate(self.list(key)):
            if not isinstance(item, dict):
                raise self.bad(f"{key}[{index}]", "an object is expected")
            yield ManifestFields(self.path, item)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.list(key)
        if not all(isinstance(item, str) for item in found):
            raise self.bad(key, "a list of texts is expected")
        return tuple(found)

    def digest(self, key: str) -> str:
        """A SHA-256 in hexadecimal."""
        return self.digest_like(key, self.text(key))

    def digest_like(self, key: str, value: object) -> str:
        """`value` if it is a SHA-256 in hexadecimal."""
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self.bad(key, "64 hexadecimal digits are expected")
        return value

    def weight_type(self, key: str) -> WeightType:
        """A weight type that is known."""
        name = self.text(key)
        if name not in TYPES:
            raise self.bad(key, f"the weight type {name[:40]!r} is unknown")
        return TYPES[name]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack. Raises CheckpointError naming the field that cannot be right.

    Checked: the version, the manifest's own hash, every size against the model's, and that every
    range lies in its file by itself. That the files are as long as they should be is not.
    """
    path = folder / MANIFEST
    document = read_json(path, MANIFEST_LIMIT)
    root = ManifestFields(path, document)
    _check_version(root)
    _check_hash(root, document)
    hyper = hyper_from_json(root.part("hyper"))
    experts, dense, source = root.part("experts"), root.part("dense"), root.part("source")
    experts_bytes, dense_bytes = _file(experts, EXPERTS), _file(dense, DENSE)
    return Manifest(
        hyper=hyper,
        layers=tuple(_layers(experts, hyper, experts_bytes)),
        experts_bytes=experts_bytes,
        tensors=tuple(_tensors(dense, hyper, dense_bytes)),
        dense_bytes=dense_bytes,
        kept=_kept(root),
        source_form=source.text("form"),
        source_hash=source.digest("model_hash"),
        left_out=root.texts("left_out"),
        model_hash=root.digest("model_hash"),
    )


def _check_version(root: ManifestFields) -> None:
    if root.text("format", "") != FORMAT:
        raise root.bad("format", f"the manifest of a pack says {FORMAT!r}")
    version = root.integer("version")
    if version != VERSION:
        raise root.bad("version", f"packs of version {VERSION} are read, this is version {version}")
    if root.text("hash") != HASH:
        raise root.bad("hash", f"{root.text('hash')[:40]!r} is unknown; {HASH} is known")


def _check_hash(root: ManifestFields, document: dict[str, Any]) -> None:
    try:
        found = manifest_hash(document)
    except (ValueError, RecursionError) as error:
        raise root.bad("model_hash", " ".join(str(error).split())[:200]) from error
    if found != root.digest("model_hash"):
        raise root.bad("model_hash", "the manifest does not have the hash that it names")


def _file(section: ManifestFields, name: str) -> int:
    """The length of the section's file, whose name is fixed: none can lead out of the folder."""
    if section.text("file") != name:
        raise section.bad("file", f"{section.text('file')[:80]!r}; only {name!r} is possible")
    nbytes = section.integer("bytes")
    if not 0 < nbytes <= MAX_BYTES:
        raise section.bad("bytes", f"{nbytes}; 1 to {MAX_BYTES} are possible")
    return nbytes


# --- experts -----------------------------------------------------------------------------------


def _layers(section: ManifestFields, hyper: Hyper, nbytes: int) -> Iterator[PackedLayer]:
    found = 0
    end = 0
    wanted = hyper.moe_layers
    for entry in section.objects("layers"):
        number = entry.integer("layer")
        if found == len(wanted) or number != wanted[found]:
            raise entry.bad("layer", f"{number}; the layers with experts are {_some(wanted)}")
        layer = _layer(entry, number, hyper)
        if layer.offset < end or layer.end > nbytes:
            raise entry.bad(
                "offset", f"layer {number} takes bytes {layer.offset} to {layer.end} of {nbytes}, "
                f"the one before it ends at {end}"
            )  # fmt: skip
        end = layer.end
        found += 1
        yield layer
    if found != len(wanted):
        raise section.bad("layers", f"{found} layers; the model has {len(wanted)} with experts")


def _layer(entry: ManifestFields, number: int, hyper: Hyper) -> PackedLayer:
    layout = _layout(entry, hyper)
    offset, stride = entry.integer("offset"), entry.integer("stride")
    for key, value in (("offset", offset), ("stride", stride)):
        if not 0 <= value <= MAX_BYTES or value % ALIGNMENT:
            raise entry.bad(key, f"{value} is not a multiple of {ALIGNMENT} within a file")
    if stride < layout.nbytes:
        raise entry.bad("stride", f"{stride} is less than a blob's {layout.nbytes} bytes")
    digests = entry.list("blobs")
    if len(digests) != hyper.experts:
        raise entry.bad("blobs", f"{len(digests)} hashes for {hyper.experts} experts")
    checked = tuple(entry.digest_like("blobs", item) for item in digests)
    return PackedLayer(number, offset, stride, layout, checked)


def _layout(entry: ManifestFields, hyper: Hyper) -> BlobLayout:
    parts: list[BlobPart] = []
    at = 0
    for name, role in zip(PARTS, EXPERT_ROLES, strict=True):
        part = entry.part(name)
        kind = part.weight_type("type")
        rows, columns = ROLES[role].shape(hyper)
        if (part.integer("rows"), part.integer("columns")) != (rows, columns):
            raise part.bad("rows, columns", f"{name} of this model has {rows} rows of {columns}")
        nbytes = _nbytes(part, kind, (rows, columns))
        parts.append(BlobPart(name, kind.name, rows, columns, at, nbytes))
        at += nbytes
    return BlobLayout((parts[0], parts[1], parts[2]), at)


def _nbytes(fields: ManifestFields, kind: WeightType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of positive dimensions whose rows are whole blocks."""
    if shape[-1] % kind.block:
        raise fields.bad("type", f"rows of {shape[-1]} are not whole {kind.name} blocks")
    elements = 1
    for dimension in shape:
        elements *= dimension
    return kind.nbytes(elements)


# --- dense weights and kept files --------------------------------------------------------------


def _tensors(section: ManifestFields, hyper: Hyper, nbytes: int) -> Iterator[PackedTensor]:
    entries = list(section.objects("tensors"))
    bias = any(entry.text("role") in QKV_BIASES for entry in entries)
    wanted = {(spec.role, layer): spec for spec, layer in dense_roles(hyper, qkv_bias=bias)}
    end = 0
    for entry in entries:
        number = entry.integer("layer") if entry.get("layer")[0] else None
        spec = wanted.pop((entry.text("role"), number), None)
        if spec is None:
            where = "" if number is None else f" in layer {number}"
            raise entry.bad("role", f"{entry.text('role')[:60]!r}{where} is stored twice or unused")
        tensor = _tensor(entry, spec, number, hyper)
        if tensor.offset < end or tensor.offset + tensor.nbytes > nbytes:
            raise entry.bad(
                "offset",
                f"{tensor.name} takes {tensor.nbytes} bytes from {tensor.offset} of {nbytes}, the "
                f"one before it ends at {end}",
            )
        end = tensor.offset + tensor.nbytes
        yield tensor
    if wanted:
        missing = _some(role if at is None else f"{role} of layer {at}" for role, at in wanted)
        raise section.bad("tensors", f"missing are {missing}")


def _tensor(entry: ManifestFields, spec: RoleSpec, layer: int | None, hyper: Hyper) -> PackedTensor:
    kind = entry.weight_type("type")
    if spec.vector and kind.name not in _FLOATS:
        raise entry.bad("type", f"{spec.role} must be one of {', '.join(_FLOATS)}")
    shape = tuple(entry.integers("shape"))
    if shape != spec.shape(hyper):
        raise entry.bad("shape", f"{list(shape)}; {spec.role} is {list(spec.shape(hyper))}")
    _nbytes(entry, kind, shape)
    offset = entry.integer("offset")
    if not 0 <= offset <= MAX_BYTES or offset % TENSOR_ALIGNMENT:
        raise entry.bad("offset", f"{offset} is not a multiple of {TENSOR_ALIGNMENT} within a file")
    return PackedTensor(
        spec.role, layer, entry.text("name"), kind.name, shape, offset, entry.digest("hash")
    )


def _kept(root: ManifestFields) -> tuple[KeptFile, ...]:
    files: dict[str, KeptFile] = {}
    for entry in root.objects("files"):
        name = entry.text("name")
        if name not in KEPT or name in files:
            raise entry.bad("name", f"{name[:80]!r} is none of {', '.join(KEPT)}, or stands twice")
        nbytes = entry.integer("bytes")
        if not 0 < nbytes <= MAX_BYTES:
            raise entry.bad("bytes", f"{nbytes} bytes of {name}")
        files[name] = KeptFile(name, nbytes, entry.digest("hash"))
    return tuple(files.values())


def _some(items: Iterable[object]) -> str:
    """A few of many, as words."""
    words = [str(item) for item in items]
    return ", ".join(words[:6]) + (", ..." if words[6:] else "")
