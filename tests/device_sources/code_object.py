"""What AMD's code objects say of their kernels: registers, spills, memory.

A code object is an ELF file, or the first of a bundle (`__CLANG_OFFLOAD_BUNDLE__`). The note of
type 32 by "AMDGPU" is a MessagePack map with `amdhsa.kernels`; its keys are those of LLVM's
AMDGPUUsage, "Code Object V3 and above Metadata".
"""

from __future__ import annotations

import struct
from typing import Any

from attrs import frozen

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
METADATA = 32


@frozen
class Usage:
    """One kernel's needs: registers of a lane and of a wave, spilled ones, bytes of memory."""

    name: str
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    shared: int
    private: int
    wave: int


def usages(code: bytes) -> list[Usage]:
    """Every kernel of a code object. Raises ValueError where there is no metadata."""
    kernels = _metadata(_elf_of(code))["amdhsa.kernels"]
    return [
        Usage(
            name=kernel[".name"],
            vgprs=kernel[".vgpr_count"],
            sgprs=kernel[".sgpr_count"],
            vgpr_spills=kernel.get(".vgpr_spill_count", 0),
            sgpr_spills=kernel.get(".sgpr_spill_count", 0),
            shared=kernel[".group_segment_fixed_size"],
            private=kernel[".private_segment_fixed_size"],
            wave=kernel[".wavefront_size"],
        )
        for kernel in kernels
    ]


def _elf_of(code: bytes) -> bytes:
    if not code.startswith(BUNDLE):
        return code
    (count,) = struct.unpack_from("<Q", code, 24)
    at = 32
    for _ in range(count):
        start, size, length = struct.unpack_from("<QQQ", code, at)
        name = code[at + 24 : at + 24 + length]
        at += 24 + length
        if b"amdgcn" in name:
            return code[start : start + size]
    raise ValueError("a bundle without a code object")


def _metadata(elf: bytes) -> dict[str, Any]:
    if not elf.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("no 64-bit ELF file")
    (sections,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    for i in range(count):
        kind, start, length = struct.unpack_from("<4xI16xQQ", elf, sections + i * size)
        if kind != 7:  # SHT_NOTE
            continue
        at = start
        while at < start + length:
            name, body, note = struct.unpack_from("<III", elf, at)
            begin = at + 12 + (name + 3) // 4 * 4
            if note == METADATA:
                return _Unpacker(elf[begin : begin + body]).value()
            at = begin + (body + 3) // 4 * 4
    raise ValueError("no metadata note")


class _Unpacker:
    """MessagePack, as far as the metadata uses it."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return value

    def _text(self, length: int) -> str:
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self) -> Any:
        tag = self._number(">B")
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 15)
        if tag < 0xA0:
            return [self.value() for _ in range(tag & 15)]
        if tag < 0xC0:
            return self._text(tag & 31)
        if tag >= 0xE0:
            return tag - 256
        return self._long(tag)

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}

    def _long(self, tag: int) -> Any:
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        numbers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h"}
        numbers |= {0xD2: ">i", 0xD3: ">q"}
        if tag in numbers:
            return self._number(numbers[tag])
        if tag in (0xD9, 0xDA, 0xDB):
            return self._text(self._number({0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}[tag]))
        if tag in (0xDC, 0xDD):
            return [self.value() for _ in range(self._number(">H" if tag == 0xDC else ">I"))]
        if tag in (0xDE, 0xDF):
            return self._map(self._number(">H" if tag == 0xDE else ">I"))
        raise ValueError(f"MessagePack tag {tag:#x}")
