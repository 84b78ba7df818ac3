"""The header of one GGUF file: metadata entries and tensor directory, every number checked.

Format: the GGUF specification of the ggml project, versions 2 and 3, little endian. Layout: magic,
version u32, tensor count u64, entry count u64, the entries, the directory, padding to the
alignment, tensor data. A string is a u64 length and that many bytes.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from math import prod

from attrs import frozen

from strata_core.checkpoint.gguf_metadata import SCALARS, Entry, Metadata
from strata_core.checkpoint.mapping import MappedFile
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.types import BY_GGML, UNSUPPORTED, WeightType
from strata_core.errors import CheckpointError

MAGIC = b"GGUF"
STRING = 8
ARRAY = 9
DEFAULT_ALIGNMENT = 32

# A file is refused beyond these, so that a hostile header costs bounded time and memory. Real
# models stay far below: about 60 entries, 2,000 tensors, 600,000 strings.
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 24
MAX_NAME = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@frozen
class TensorInfo:
    """One entry of the directory: `shape` row-major, `offset` counted from the file's start."""

    name: str
    type: WeightType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@frozen
class Header:
    """What the header of one GGUF file says; `nbytes` is where the tensor data begin."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    nbytes: int


def read_header(file: MappedFile) -> Header:
    """Read and check the whole header of a mapped GGUF file. Raises CheckpointError."""
    cursor = _Cursor(file)
    version = _version(cursor)
    tensors = cursor.count("tensor count", 8 + 1 + 4 + 8 + 4 + 8, MAX_TENSORS)
    entries = cursor.count("metadata count", 8 + 1 + 4 + 1, MAX_ENTRIES)
    metadata = _metadata(cursor, entries)
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise metadata.bad("general.alignment", f"{alignment} is not a power of two up to 2^20")
    raw = [_directory_entry(cursor) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    infos = tuple(_place(cursor, entry, start, alignment) for entry in raw)
    _check_directory(cursor, infos)
    return Header(version, metadata, infos, min(start, file.size))


def _version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.bad("magic", f"the file begins with {magic!r}, a GGUF file with {MAGIC!r}")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version == 1:
        raise cursor.bad("version", "GGUF version 1 is not read; versions 2 and 3 are")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise cursor.bad("version", "the file is big endian; only little endian files are read")
    raise cursor.bad("version", f"GGUF version {version} is unknown; versions 2 and 3 are read")


def _metadata(cursor: _Cursor, count: int) -> Metadata:
    entries: dict[str, Entry] = {}
    strings_left = MAX_STRINGS
    for index in range(count):
        key = cursor.name(f"key of metadata entry {index}")
        if key in entries:
            raise cursor.bad(key, "the key stands in the metadata twice")
        kind = cursor.u32(key)
        if kind == ARRAY:
            element = cursor.u32(key)
            length = cursor.u64(key)
            entries[key] = Entry(kind, cursor.at, length, element)
            strings_left = _skip_array(cursor, key, element, length, strings_left)
        elif kind == STRING:
            length = cursor.u64(key)
            entries[key] = Entry(kind, cursor.at, length)
            cursor.skip(length, key)
        elif kind in SCALARS:
            entries[key] = Entry(kind, cursor.at, 1)
            cursor.skip(SCALARS[kind].size, key)
        else:
            raise cursor.bad(key, f"value type {kind} is unknown")
    return Metadata(cursor.file, entries)


def _skip_array(cursor: _Cursor, key: str, element: int, length: int, strings_left: int) -> int:
    """Step over an array; returns how many more strings the file may hold."""
    if element in SCALARS:
        cursor.skip(length * SCALARS[element].size, key)
        return strings_left
    if element != STRING:
        what = "nested arrays are not read" if element == ARRAY else f"type {element} is unknown"
        raise cursor.bad(key, f"the array's element type: {what}")
    if length > strings_left or length * 8 > cursor.left:
        raise cursor.bad(key, f"{length} strings do not fit the file or the limit {MAX_STRINGS}")
    # The one loop that scales with the vocabulary (300,000 rounds for a large one): kept bare.
    at, size, unpack, data = cursor.at, cursor.size, _U64.unpack_from, cursor.view
    for index in range(length):
        if at + 8 > size:
            raise cursor.bad(key, f"the file ends before string {index} of {length}")
        at += 8 + unpack(data, at)[0]
    if at > size:
        raise cursor.bad(key, "a string ends past the end of the file")
    cursor.at = at
    return strings_left - length


@frozen
class _Raw:
    """A directory entry as stored; `dims` in the file's order, the fastest first."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


def _directory_entry(cursor: _Cursor) -> _Raw:
    name = cursor.name("name of a tensor")
    rank = cursor.u32(f"tensor {name}, dimensions")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise cursor.bad(f"tensor {name}, dimensions", f"{rank} dimensions; 1 to 4 are possible")
    dims = tuple(cursor.u64(f"tensor {name}, shape") for _ in range(rank))
    kind = cursor.u32(f"tensor {name}, type")
    return _Raw(name, dims, kind, cursor.u64(f"tensor {name}, offset"))


def _place(cursor: _Cursor, raw: _Raw, start: int, alignment: int) -> TensorInfo:
    """The entry with type and place resolved, checked against the file's size."""
    field = f"tensor {raw.name}"
    type_ = BY_GGML.get(raw.kind)
    if type_ is None:
        name = UNSUPPORTED.get(raw.kind)
        what = f"type {name} has no kernels in Strata" if name else f"type {raw.kind} is unknown"
        raise cursor.bad(f"{field}, type", what)
    if min(raw.dims) == 0:
        raise cursor.bad(f"{field}, shape", f"{list(raw.dims)} has a dimension of 0")
    elements = prod(raw.dims)
    if elements // type_.block * type_.block_bytes > cursor.size:
        raise cursor.bad(f"{field}, shape", f"{list(raw.dims)} is more than the file can hold")
    if raw.dims[0] % type_.block:
        raise cursor.bad(
            f"{field}, shape",
            f"rows of {raw.dims[0]} are not whole {type_.name} blocks of {type_.block}",
        )
    nbytes = type_.nbytes(elements)
    if raw.offset % alignment:
        raise cursor.bad(f"{field}, offset", f"{raw.offset} is not a multiple of {alignment}")
    if start + raw.offset + nbytes > cursor.size:
        raise cursor.bad(
            f"{field}, offset",
            f"its {nbytes} bytes from {start + raw.offset} end past the file's {cursor.size}",
        )
    return TensorInfo(raw.name, type_, raw.dims[::-1], start + raw.offset, nbytes)


def _check_directory(cursor: _Cursor, infos: tuple[TensorInfo, ...]) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise cursor.bad(f"tensor {info.name}", "the name stands in the directory twice")
        seen.add(info.name)
    ordered = sorted(infos, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.bad(
                f"tensor {after.name}, offset", f"its bytes overlap those of tensor {before.name}"
            )


class _Cursor:
    """Reads forward through the header; a read past the end names the field that was read."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.view = file.view
        self.size = file.size
        self.at = 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def bad(self, field: str, why: str) -> CheckpointError:
        return bad_field(self.file, field, why)

    def skip(self, nbytes: int, field: str) -> None:
        if nbytes > self.left:
            raise self.bad(field, f"{nbytes} bytes wanted, the file has {self.left} more")
        self.at += nbytes

    def take(self, nbytes: int, field: str) -> bytes:
        start = self.at
        self.skip(nbytes, field)
        return bytes(self.view[start : start + nbytes])

    def u32(self, field: str) -> int:
        start = self.at
        self.skip(4, field)
        return int(_U32.unpack_from(self.view, start)[0])

    def u64(self, field: str) -> int:
        start = self.at
        self.skip(8, field)
        return int(_U64.unpack_from(self.view, start)[0])

    def count(self, field: str, least: int, most: int) -> int:
        """A count of things that take at least `least` bytes each."""
        value = self.u64(field)
        if value > most or value * least > self.left:
            raise self.bad(field, f"{value} of them do not fit the file or the limit {most}")
        return value

    def name(self, field: str) -> str:
        length = self.u64(field)
        if not 0 < length <= MAX_NAME:
            raise self.bad(field, f"a length of {length} bytes; 1 to {MAX_NAME} are possible")
        raw = self.take(length, field)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.bad(field, f"{raw[:60]!r} is not UTF-8") from error


def bad_field(file: MappedFile, field: str, why: str) -> CheckpointError:
    """The error for a field of a GGUF file that cannot be right."""
    return CheckpointError(
        f"{file.path}: bad GGUF field: {printable(field)}",
        why,
        "the file is damaged or was not written for this format; download or convert it again",
    )
