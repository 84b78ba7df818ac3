"""Where everything goes in a pack: pure arithmetic over an open checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from strata_core.checkpoint.open import Checkpoint
from strata_core.checkpoint.pack_format import (
    DENSE,
    EXPERTS,
    MANIFEST,
    MANIFEST_LIMIT,
    TENSOR_ALIGNMENT,
    KeptFile,
    Manifest,
    PackedLayer,
    PackedTensor,
    aligned,
)
from strata_core.checkpoint.tensor import Tensor
from strata_core.checkpoint.types import TYPES, WeightType
from strata_core.errors import UsageError
from strata_core.interfaces import Expert, Piece

_HASH_TEXT = 70
"""Bytes that one hash takes in the manifest."""


@frozen
class Item:
    """One blob or dense tensor on its way into a pack.

    Its bytes are those of `parts` one after the other, written to `file` from `offset` on; from
    their end to `end` zeros are written, so that the items leave no byte of the file undefined.
    """

    what: str
    file: str
    offset: int
    end: int
    parts: tuple[tuple[Piece, WeightType], ...]

    @property
    def nbytes(self) -> int:
        """Bytes without the zeros."""
        return sum(piece.nbytes for piece, _ in self.parts)


@frozen(eq=False)
class Unit:
    """What is written, flushed and noted as one: the model's own tensors, or a layer.

    `items` are the dense tensors `dense`, in their order, and then the layer's experts.
    """

    name: str
    layer: int | None
    dense: tuple[Tensor, ...]
    roles: tuple[str, ...]
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


@frozen(eq=False)
class Arrangement:
    """The units in the order of their places, and the lengths of the two files."""

    checkpoint: Checkpoint
    units: tuple[Unit, ...]
    lengths: Mapping[str, int] = field()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(unit.nbytes for unit in self.units)

    def manifest(
        self, digests: Mapping[str, Sequence[str]], kept: tuple[KeptFile, ...]
    ) -> Manifest:
        """The manifest, given the hash of each item by unit and the kept files."""
        layers: list[PackedLayer] = []
        tensors: list[PackedTensor] = []
        for unit in self.units:
            hashes = digests[unit.name]
            dense = len(unit.dense)
            for role, tensor, item, digest in zip(
                unit.roles, unit.dense, unit.items[:dense], hashes[:dense], strict=True
            ):
                kind, shape = tensor.type.name, tensor.shape
                tensors.append(
                    PackedTensor(role, unit.layer, tensor.name, kind, shape, item.offset, digest)
                )
            if blobs := unit.items[dense:]:
                assert unit.layer is not None, "experts belong to a layer"
                layout = self.checkpoint.experts.layouts[unit.layer]
                start, stride = blobs[0].offset, aligned(layout.nbytes)
                layers.append(PackedLayer(unit.layer, start, stride, layout, tuple(hashes[dense:])))
        return Manifest(
            hyper=self.checkpoint.hyper,
            layers=tuple(layers),
            experts_bytes=self.lengths[EXPERTS],
            tensors=tuple(tensors),
            dense_bytes=self.lengths[DENSE],
            kept=kept,
            source_form=self.checkpoint.form,
            source_hash=self.checkpoint.model_hash,
            left_out=self.checkpoint.unclaimed,
        )


def arrange(checkpoint: Checkpoint) -> Arrangement:
    """Places for everything in a checkpoint; UsageError where a manifest cannot hold them."""
    experts = checkpoint.experts
    if experts.count * len(experts.layouts) * _HASH_TEXT > MANIFEST_LIMIT // 2:
        raise UsageError(
            f"{checkpoint.path} has too many experts for a pack",
            f"{experts.count} in each of {len(experts.layouts)} layers; a {MANIFEST} of "
            f"{MANIFEST_LIMIT} bytes cannot hold the hashes of so many",
            "use the model as it is",
        )
    units: list[Unit] = []
    dense_end = experts_end = 0
    for layer in (None, *range(checkpoint.hyper.layers)):
        found = [(role, t) for (role, at), t in checkpoint.tensors.items() if at == layer]
        dense = list(_dense_items([tensor for _, tensor in found], dense_end))
        dense_end = dense[-1].end if dense else dense_end
        blobs = list(_blob_items(checkpoint, layer, experts_end))
        experts_end = blobs[-1].end if blobs else experts_end
        units.append(
            Unit(
                "the model" if layer is None else f"layer {layer}",
                layer,
                tuple(tensor for _, tensor in found),
                tuple(role for role, _ in found),
                (*dense, *blobs),
            )
        )
    return Arrangement(checkpoint, tuple(units), {EXPERTS: experts_end, DENSE: dense_end})


def _dense_items(tensors: Sequence[Tensor], start: int) -> Iterator[Item]:
    """A section: tensors at multiples of 64 bytes, its end at a multiple of 4 KiB."""
    at = start
    for number, tensor in enumerate(tensors, 1):
        end = aligned(at + tensor.nbytes, TENSOR_ALIGNMENT)
        if number == len(tensors):
            end = aligned(end)
        yield Item(f"tensor {tensor.name}", DENSE, at, end, ((tensor.piece, tensor.type),))
        at = end


def _blob_items(checkpoint: Checkpoint, layer: int | None, start: int) -> Iterator[Item]:
    layout = None if layer is None else checkpoint.experts.layouts.get(layer)
    if layer is None or layout is None:
        return
    stride = aligned(layout.nbytes)
    types = [TYPES[part.type] for part in layout.parts]
    for index in range(checkpoint.experts.count):
        expert = Expert(layer, index)
        parts = tuple(zip(checkpoint.experts.pieces(expert), types, strict=True))
        at = start + index * stride
        yield Item(str(expert), EXPERTS, at, at + stride, parts)
