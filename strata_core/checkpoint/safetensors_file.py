"""One safetensors file as tensors over mapped memory.

The safetensors library reads and validates the header: that offsets are in order, without overlap
or hole, and that they end with the file. So the order of its keys by offset and the size of each
tensor say where each one starts, and a view of our own mapping needs no copy (and no numpy type,
which bfloat16 lacks).
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import safetensors
from attrs import frozen

from strata_core.checkpoint.mapping import MappedFile, map_file
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.tensor import Tensor
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError

_LENGTH = struct.Struct("<Q")
_FLOATS = ("F32", "F16", "BF16")


@frozen(eq=False)
class SafetensorsFile:
    """A mapped file, the bytes its header takes, and its tensors by name."""

    mapped: MappedFile
    header_bytes: int
    tensors: dict[str, Tensor]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map one file. Raises CheckpointError naming the file and, where known, the tensor."""
    mapped = map_file(path)
    entries = _directory(path)
    at = 8 + int(_LENGTH.unpack_from(mapped.view, 0)[0])
    start = at
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in entries:
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{path}: tensor {printable(name)} has the type {dtype}",
                f"hub folders are read with {', '.join(_FLOATS)} only",
                "use an unquantised checkpoint, or a GGUF file of the model",
            )
        nbytes = TYPES[dtype].nbytes(prod(shape))
        data = mapped.data[at : at + nbytes]
        tensors[name] = Tensor(name, TYPES[dtype], shape, data, path, at)
        at += nbytes
    if at != mapped.size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {at}, the file at {mapped.size}",
            "the file changed while it was opened, or its header is damaged",
            "download the file again",
        )
    return SafetensorsFile(mapped, start, tensors)


def _directory(path: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, type, shape) of every tensor in the order of their bytes."""
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            slices = ((name, file.get_slice(name)) for name in file.offset_keys())
            return [(n, str(s.get_dtype()), tuple(s.get_shape())) for n, s in slices]
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file",
            " ".join(str(error).split()),
            "the file is damaged or incomplete; download it again",
        ) from error
