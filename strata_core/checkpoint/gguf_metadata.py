"""The key-value metadata of a GGUF file, decoded when asked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import numpy as np
from attrs import frozen

from strata_core.checkpoint.mapping import MappedFile
from strata_core.errors import CheckpointError

SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""GGUF's number types: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64."""

_STRING = 8
_ARRAY = 9
_U64 = struct.Struct("<Q")
_FIRST_KEY = 24
"""Where the entries begin: after magic, version and the two counts."""


@frozen
class Entry:
    """Where a value lies: its type, the offset of its first byte, bytes of a string or elements."""

    kind: int
    offset: int
    length: int
    element: int = -1


@frozen(eq=False)
class Metadata:
    """Typed access to the entries; a value of the wrong type is an error naming file and key.

    Nothing is kept: every call decodes again, from the mapped file. Any thread may call it.
    """

    file: MappedFile
    entries: Mapping[str, Entry]

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def bad(self, key: str, why: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        return CheckpointError(
            f"{self.file.path}: bad GGUF metadata: {key}",
            why,
            "the file is damaged or not a model for Strata; download or convert it again",
        )

    def scalar(self, key: str) -> int | float | bool | str | None:
        """A number, flag or text; None where the key is missing."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.kind == _STRING:
            return self._decode(key, entry.offset, entry.length)
        if entry.kind == _ARRAY:
            raise self.bad(key, "an array where one value is expected")
        layout = SCALARS[entry.kind]
        value: int | float | bool = layout.unpack_from(self.file.view, entry.offset)[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a missing key without a default is an error."""
        value = self.scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, _expected("a whole number", value))
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number; a missing key without a default is an error."""
        value = self.scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, _expected("a number", value))
        if not isfinite(value):
            raise self.bad(key, f"{value} is not finite")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.scalar(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, _expected("true or false", value))
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text; a missing key without a default is an error."""
        value = self.scalar(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, _expected("a text", value))
        return value

    def length(self, key: str) -> int:
        """Number of elements of an array, 0 where the key is missing; nothing is decoded."""
        entry = self.entries.get(key)
        if entry is None:
            return 0
        if entry.kind != _ARRAY:
            raise self.bad(key, "one value where an array is expected")
        return entry.length

    def texts(self, key: str) -> list[str]:
        """An array of texts, decoded now."""
        length = self.length(key)
        if not length:
            return []
        entry = self.entries[key]
        if entry.element != _STRING:
            raise self.bad(key, "an array of numbers where texts are expected")
        # One copy of the array's bytes: slicing an array element by element is ten times slower.
        end = self._array_end(entry)
        raw = self.file.data[entry.offset : end].tobytes()
        result: list[str] = []
        at = 0
        for index in range(length):
            size = _U64.unpack_from(raw, at)[0]
            at += 8
            try:
                result.append(raw[at : at + size].decode())
            except UnicodeDecodeError as error:
                raise self.bad(key, f"element {index} is not UTF-8") from error
            at += size
        return result

    def numbers(self, key: str) -> np.ndarray:
        """An array of numbers, as a copy in the machine's byte order."""
        length = self.length(key)
        entry = self.entries.get(key)
        if entry is None or not length:
            return np.zeros(0, np.int64)
        if entry.element not in SCALARS:
            raise self.bad(key, "an array of texts where numbers are expected")
        layout = SCALARS[entry.element]
        dtype = np.dtype(layout.format)
        raw = self.file.data[entry.offset : entry.offset + length * layout.size]
        return raw.view(dtype).astype(dtype.newbyteorder("="))

    def plain(self, limit: int = 8) -> dict[str, Any]:
        """Every entry for display: scalars as they are, long arrays as a short description."""
        shown: dict[str, Any] = {}
        for key, entry in self.entries.items():
            if entry.kind != _ARRAY:
                shown[key] = self.scalar(key)
            elif entry.length > limit:
                shown[key] = f"[{entry.length} values]"
            elif entry.element == _STRING:
                shown[key] = self.texts(key)
            else:
                shown[key] = self.numbers(key).tolist()
        return shown

    def without_tensors(self) -> bytes:
        """A GGUF file (version 3) that holds these entries, byte for byte, and no tensor."""
        end = max((self._end(entry) for entry in self.entries.values()), default=_FIRST_KEY)
        counts = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(self.entries))
        return counts + self.file.data[_FIRST_KEY:end].tobytes()

    def _end(self, entry: Entry) -> int:
        """Where the bytes of an entry's value end."""
        if entry.kind == _STRING:
            return entry.offset + entry.length
        if entry.kind != _ARRAY:
            return entry.offset + SCALARS[entry.kind].size
        if entry.element == _STRING:
            return self._array_end(entry)
        return entry.offset + entry.length * SCALARS[entry.element].size

    def _array_end(self, entry: Entry) -> int:
        at = entry.offset
        for _ in range(entry.length):
            at += 8 + _U64.unpack_from(self.file.view, at)[0]
        return at

    def _decode(self, key: str, offset: int, length: int) -> str:
        try:
            return self.file.data[offset : offset + length].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self.bad(key, "the text is not UTF-8") from error


def _expected(what: str, value: object) -> str:
    if value is None:
        return f"the key is missing; {what} is needed"
    return f"{str(value)[:60]!r} where {what} is expected"
