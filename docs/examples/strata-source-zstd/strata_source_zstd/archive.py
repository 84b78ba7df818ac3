"""The file of compressed experts: its index, the order of bytes in it, reading and writing it.

`experts.zst` holds one Zstandard frame for each expert, layer by layer, one after the other.
`experts.zst.json` says where each one is. A frame is the blob as the pack has it, the zeros up to
its stride included, after its bytes were put in another order: with `stride` s, byte 0 of every s
bytes comes first, then byte 1 of them, and so on. Scales then stand beside scales and exponents
beside exponents, which compresses better. What follows the last whole s bytes stays behind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert

DATA = "experts.zst"
INDEX = "experts.zst.json"
FORMAT = "strata zstd experts"
VERSION = 1
STRIDES = (1, 2, 4, 16, 17, 18, 20, 34, 84, 110, 144, 176, 210)
"""Orders that are tried: none, numbers of 2 and 4 bytes, and the blocks of quantised types."""

Bytes = NDArray[np.uint8]
_LARGEST_INDEX = 1 << 28
_MOST = 1 << 40


def shuffled(blob: Bytes, stride: int) -> Bytes:
    """The bytes in the order in which they are compressed."""
    if stride == 1:
        return blob
    whole = len(blob) // stride * stride
    moved = blob.copy()
    _transpose(blob[:whole].reshape(-1, stride), moved[:whole].reshape(stride, -1).T)
    return moved


def restore(moved: Bytes, stride: int, target: Bytes) -> None:
    """Undo `shuffled` into `target`, which may be shorter: the zeros after a blob are dropped."""
    if stride == 1:
        target[:] = moved[: len(target)]
        return
    whole = len(moved) // stride * stride
    back = target if len(target) >= whole else np.empty(whole, np.uint8)
    _transpose(moved[:whole].reshape(stride, -1).T, back[:whole].reshape(-1, stride))
    if back is target:
        target[whole:] = moved[whole : len(target)]
    else:
        target[:] = back[: len(target)]


def _transpose(source: Bytes, target: Bytes) -> None:
    # Column by column: a copy of the whole is several times slower for narrow ones.
    for column in range(source.shape[1]):
        target[:, column] = source[:, column]


@frozen
class Frames:
    """The experts of one layer: `size` bytes each before compression, frames at `places`."""

    size: int
    stride: int
    places: tuple[tuple[int, int], ...]

    def as_json(self) -> dict[str, Any]:
        """One entry of the index."""
        return {"size": self.size, "stride": self.stride, "frames": [list(p) for p in self.places]}


@frozen
class Archive:
    """An open archive: where it is, and its layers. Immutable."""

    path: Path
    layers: Mapping[int, Frames]
    nbytes: int

    @property
    def raw(self) -> int:
        """Bytes before compression."""
        return sum(frames.size * len(frames.places) for frames in self.layers.values())

    def place(self, expert: Expert) -> tuple[int, int]:
        """Offset and length of an expert's frame."""
        return self.layers[expert.layer].places[expert.index]

    def write_index(self, folder: Path) -> None:
        """Write the index into a folder."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "bytes": self.nbytes,
            "layers": {str(layer): frames.as_json() for layer, frames in self.layers.items()},
        }
        (folder / INDEX).write_text(json.dumps(document), "utf-8")


def open_archive(folder: Path) -> Archive:
    """The archive in a pack's folder, its index checked. Raises CheckpointError."""
    path = folder / INDEX
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise ValueError("it is larger than any index")
        document = json.loads(path.read_bytes())
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is none of format {FORMAT!r}, version {VERSION}")
        layers = {int(key): _frames(item) for key, item in document["layers"].items()}
        nbytes = _number(document["bytes"], 1, _MOST)
        size = (folder / DATA).stat().st_size
        if size != nbytes:
            raise ValueError(f"{DATA} has {size} bytes instead of {nbytes}")
        ends = [at + length for frames in layers.values() for at, length in frames.places]
        if not ends or max(ends) > nbytes:
            raise ValueError(f"a frame does not lie within the {nbytes} bytes of {DATA}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{error}"
        raise CheckpointError(
            f"{path} cannot be used",
            " ".join(str(why).split()) or type(error).__name__,
            "convert the pack again with `strata-zstd convert`",
        ) from error
    return Archive(folder / DATA, layers, nbytes)


def _frames(item: Mapping[str, Any]) -> Frames:
    places = tuple((_number(at, 0, _MOST), _number(size, 1, _MOST)) for at, size in item["frames"])
    return Frames(_number(item["size"], 1, _MOST), _number(item["stride"], 1, 1 << 16), places)


def _number(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
    return value
