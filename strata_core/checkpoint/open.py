"""Opening a model: `open_checkpoint(path)` makes a Checkpoint of any form that can be read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from attrs import frozen

from strata_core.checkpoint.assign import Assigned, assign_roles
from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.experts import PARTS, ExpertTable
from strata_core.checkpoint.gguf import open_gguf
from strata_core.checkpoint.gguf_metadata import Metadata
from strata_core.checkpoint.hub import CONFIG, open_hub
from strata_core.checkpoint.hyper import Hyper
from strata_core.checkpoint.hyper_gguf import read_gguf_hyper
from strata_core.checkpoint.hyper_hub import read_hub_hyper, wants_qkv_bias
from strata_core.checkpoint.mapping import MappedFile, exists, read_small, unreadable
from strata_core.checkpoint.pack_format import METADATA, Manifest
from strata_core.checkpoint.packed import PackedExperts, is_pack, open_pack
from strata_core.checkpoint.roles import ROLES, names
from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError

if TYPE_CHECKING:
    from strata_core.interfaces import ExpertFiles, Weights

    def _conforms(checkpoint: Checkpoint) -> tuple[Weights, ExpertFiles]:
        return checkpoint, checkpoint.experts


_SAMPLES = 16
_SAMPLE_BYTES = 4096


@frozen(eq=False, slots=False)
class Checkpoint:
    """An open model: sizes, and every tensor as a read-only view of a mapped file.

    Every tensor that the model needs was found and has the right shape. Implements
    `interfaces.Weights` (through `raw`); `experts` implements `interfaces.ExpertFiles`. Immutable,
    any thread may use it. `gguf` is the metadata of a GGUF model, also of one that was packed,
    `config` the config.json of a hub folder, `pack` the manifest of a pack; the others are None.
    `form` is "gguf", "hub" or "pack", or what a plugin calls the form in which it keeps the experts
    of a pack.
    `unclaimed` names stored tensors that the model does not use.
    """

    path: Path
    form: str
    hyper: Hyper
    tensors: Mapping[tuple[str, int | None], Tensor]
    experts: ExpertTable | PackedExperts
    unclaimed: tuple[str, ...]
    gguf: Metadata | None
    config: Config | None
    mapped: tuple[MappedFile, ...]
    header_bytes: tuple[int, ...]
    pack: Manifest | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights, in shard order."""
        return tuple(file.path for file in self.mapped)

    def tensor(self, role: str, layer: int | None = None) -> Tensor:
        """The dense tensor of a role. Raises CheckpointError naming role and tensor."""
        found = self.tensors.get((role, layer))
        if found is None:
            spec = ROLES.get(role)
            form = self.pack.source_form if self.pack else self.form
            stored = " or ".join(names(spec, form, layer, 0)) if spec else "no known tensor"
            where = "" if layer is None else f" in layer {layer}"
            raise CheckpointError(
                f"{self.path} has no {role}{where}",
                f"it would be stored as {stored}; routed experts are reached through `experts`",
                f"a {self.hyper.family} model with these sizes has none",
            )
        return found

    def raw(self, role: str, layer: int | None) -> tuple[str, tuple[int, ...], np.ndarray]:
        """(type name, shape, uint8 bytes as stored), a view of the mapped file."""
        tensor = self.tensor(role, layer)
        return tensor.type.name, tensor.shape, tensor.data

    @cached_property
    def model_hash(self) -> str:
        """SHA-256 (hex) that tells models apart cheaply: the same bytes give the same value.

        Covers, file by file in shard order, the size, the whole header and 16 pages of 4 KiB spread
        evenly over the rest; for a hub folder config.json too. Names and times do not count. A
        change that spares every sampled page is not seen: this identifies, it does not verify.
        A pack's is its manifest's hash, which covers every byte that `strata verify` compares.
        Raises CheckpointError where config.json cannot be read any more.
        """
        if self.pack is not None:
            return self.pack.model_hash
        digest = hashlib.sha256()
        if self.config is not None:
            digest.update(read_small(self.config.path))
        for file, header in zip(self.mapped, self.header_bytes, strict=True):
            digest.update(file.size.to_bytes(8, "little"))
            digest.update(file.view[:header])
            step = max((file.size - header) // _SAMPLES, 1)
            for start in range(header, file.size, step):
                digest.update(file.view[start : start + _SAMPLE_BYTES])
        return digest.hexdigest()

    @property
    def origin_hash(self) -> str:
        """`model_hash` of what a pack was made from; of others their own.

        What is known of a model's use (profiles) goes by it, so that it serves file and pack alike.
        """
        return self.model_hash if self.pack is None else self.pack.source_hash

    def metadata(self) -> dict[str, Any]:
        """What `strata inspect` shows, JSON-ready: sizes, files, weight types by count and role.

        `types` maps a type name to tensors and bytes; `roles` maps a role to bytes by type name.
        An expert counts as one tensor per part.
        """
        types: dict[str, dict[str, int]] = {}
        roles: dict[str, dict[str, int]] = {}

        def add(role: str, kind: str, count: int, nbytes: int) -> None:
            entry = types.setdefault(kind, {"tensors": 0, "bytes": 0})
            entry["tensors"] += count
            entry["bytes"] += nbytes
            by_type = roles.setdefault(role, {})
            by_type[kind] = by_type.get(kind, 0) + nbytes

        for (role, _), tensor in self.tensors.items():
            add(role, tensor.type.name, 1, tensor.nbytes)
        count = self.experts.count
        for layout in self.experts.layouts.values():
            for name, part in zip(PARTS, layout.parts, strict=True):
                add(f"experts_{name}", part.type, count, count * part.nbytes)
        return {
            "path": str(self.path),
            "form": self.form,
            "architecture": self.hyper.family,
            "name": self.hyper.name,
            "files": [{"path": str(f.path), "bytes": f.size} for f in self.mapped],
            "types": types,
            "roles": roles,
            "unclaimed": list(self.unclaimed),
            "model_hash": self.model_hash,
        }

    def close(self) -> None:
        """End the use of the checkpoint; calling it again does nothing.

        The mappings are read-only and shared with every view handed out, so each is unmapped when
        its last view is gone; there is nothing else to free.
        """


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file (any shard of a split one), a hub-layout folder or a pack.

    Reads headers and configuration only, copies no tensor, and checks presence, shape and type of
    everything the model needs. Raises CheckpointError naming file and field; nothing stays open.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not is_folder:
        _refuse_part(path)
        return _open_gguf(path)
    return _open_pack(path) if is_pack(path) else _open_hub(path)


def _refuse_part(path: Path) -> None:
    """Raise CheckpointError where a file is a part of a hub folder or of a pack."""
    folder = path.absolute().parent
    if path.suffix == ".gguf" and path.name != METADATA:
        return  # a model of its own, wherever it lies
    packed = is_pack(folder)
    if not packed and not (path.suffix in (".json", ".safetensors") and exists(folder / CONFIG)):
        return
    raise CheckpointError(
        f"{path} is not a model by itself",
        f"it lies in {'a pack' if packed else 'a hub folder'}, which is one as a whole",
        f"name the folder: {path.parent}",
    )


def _open_gguf(path: Path) -> Checkpoint:
    model = open_gguf(path)
    hyper = read_gguf_hyper(model.metadata, model.tensors)
    assigned = assign_roles(path, "gguf", hyper, model.tensors)
    return _checkpoint(
        path, "gguf", hyper, assigned, model.metadata, None, model.files, model.header_bytes
    )


def _open_hub(folder: Path) -> Checkpoint:
    if not exists(folder / CONFIG):
        inside = sorted(p.name for p in folder.glob("*.gguf"))[:3]
        raise CheckpointError(
            f"{folder} holds no model",
            f"there is no {CONFIG} in it",
            f"name the file itself: {folder / inside[0]}"
            if inside
            else "name a .gguf file, a pack, or a folder with config.json and safetensors files",
        )
    model = open_hub(folder)
    hyper = read_hub_hyper(model.config, model.generation)
    # The embedding serves as head of a tied model even where a head is stored beside it.
    assigned = assign_roles(folder, "hub", hyper, model.tensors)
    if wants_qkv_bias(model.config, hyper.family) != (("attn_q_bias", 0) in assigned.tensors):
        raise model.config.bad("qkv_bias", "the stored tensors do not agree with it")
    return _checkpoint(
        folder, "hub", hyper, assigned, None, model.config, model.files, model.header_bytes
    )


def _open_pack(folder: Path) -> Checkpoint:
    found = open_pack(folder)
    return Checkpoint(
        path=folder,
        form=found.form,
        hyper=found.manifest.hyper,
        tensors=found.tensors,
        experts=found.experts,
        unclaimed=(),
        gguf=found.gguf,
        config=None,
        mapped=found.files,
        header_bytes=(0,) * len(found.files),
        pack=found.manifest,
    )


def _checkpoint(
    path: Path,
    form: Literal["gguf", "hub"],
    hyper: Hyper,
    assigned: Assigned,
    gguf: Metadata | None,
    config: Config | None,
    mapped: tuple[MappedFile, ...],
    header_bytes: tuple[int, ...],
) -> Checkpoint:
    return Checkpoint(
        path=path,
        form=form,
        hyper=hyper,
        tensors=assigned.tensors,
        experts=assigned.experts,
        unclaimed=assigned.unclaimed,
        gguf=gguf,
        config=config,
        mapped=mapped,
        header_bytes=header_bytes,
    )
