"""The GGUF header reader against hand-made files, each wrong in one field."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_core.checkpoint.gguf_header import read_header
from strata_core.checkpoint.mapping import map_file
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError

HUGE = 1 << 60


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(
    name: str | bytes, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    packed = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + packed + struct.pack("<IQ", kind, offset)


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: int = 256,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    counts = counts or (len(tensors), len(entries))
    head = magic + version + struct.pack("<QQ", *counts) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(content: bytes):  # type: ignore[no-untyped-def]
        path = tmp_path / "made.gguf"
        path.write_bytes(content)
        return read_header(map_file(path))

    return run


def test_a_correct_file_is_read(read) -> None:  # type: ignore[no-untyped-def]
    strings = struct.pack("<IQ", 8, 2) + text("a") + text("ü")
    header = read(
        build(
            [
                entry("u8", 0, b"\x07"),
                entry("i16", 3, struct.pack("<h", -2)),
                entry("f32", 6, struct.pack("<f", 1.5)),
                entry("flag", 7, b"\x01"),
                entry("text", 8, text("héllo")),
                entry("list", 9, strings),
                entry("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
                entry("i64", 11, struct.pack("<q", -(1 << 40))),
            ],
            [tensor("a", (16, 2)), tensor("b", (32,), 8, 128)],
        )
    )
    metadata = header.metadata
    assert metadata.integer("u8") == 7
    assert metadata.integer("i16") == -2
    assert metadata.real("f32") == 1.5
    assert metadata.flag("flag", False) is True
    assert metadata.text("text") == "héllo"
    assert metadata.texts("list") == ["a", "ü"]
    assert metadata.numbers("numbers").tolist() == [1, -2, 3]
    assert metadata.integer("i64") == -(1 << 40)
    assert [(t.name, t.shape, t.nbytes) for t in header.tensors] == [
        ("a", (2, 16), 128),
        ("b", (32,), 34),
    ]
    assert header.tensors[1].offset == header.nbytes + 128
    for key, call in (("u8", metadata.text), ("text", metadata.integer), ("flag", metadata.real)):
        with pytest.raises(CheckpointError, match=f"metadata: {key}"):
            call(key)
    for key, call in (("list", metadata.numbers), ("numbers", metadata.texts)):
        with pytest.raises(CheckpointError, match=f"metadata: {key}"):
            call(key)


BAD = {
    "magic": (build(magic=b"GGML"), "magic", "begins with"),
    "version 1": (build(version=struct.pack("<I", 1)), "version", "version 1"),
    "big endian": (build(version=struct.pack(">I", 3)), "version", "big endian"),
    "version 9": (build(version=struct.pack("<I", 9)), "version", "version 9"),
    "tensor count": (build(counts=(HUGE, 0)), "tensor count", "limit"),
    "entry count": (build(counts=(0, HUGE)), "metadata count", "limit"),
    "counts beyond the file": (build(counts=(100, 0)), "tensor count", "do not fit"),
    "short header": (b"GGUF\3\0\0\0", "tensor count", "wanted"),
    "only magic": (b"GG", "magic", "wanted"),
    "key length": (
        build([struct.pack("<Q", HUGE) + b"x"], counts=(0, 1)),
        "key of metadata entry 0",
        "a length",
    ),
    "key not UTF-8": (build([entry(b"\xff", 0, b"\0")]), "key of metadata", "UTF-8"),
    "empty key": (build([entry("", 0, b"\0")]), "key of metadata", "length of 0"),
    "duplicate key": (build([entry("k", 0, b"\0")] * 2), "k", "twice"),
    "value type": (build([entry("k", 13, b"\0" * 8)]), "k", "13 is unknown"),
    "text length": (build([entry("k", 8, struct.pack("<Q", HUGE))]), "k", "wanted"),
    "array length": (build([entry("k", 9, struct.pack("<IQ", 4, HUGE))]), "k", "wanted"),
    "strings": (build([entry("k", 9, struct.pack("<IQ", 8, HUGE))]), "k", "strings"),
    "string in array": (
        build([entry("k", 9, struct.pack("<IQQ", 8, 1, HUGE))]),
        "k",
        "past the end",
    ),
    "nested array": (build([entry("k", 9, struct.pack("<IQ", 9, 1))]), "k", "nested"),
    "array type": (build([entry("k", 9, struct.pack("<IQ", 77, 1))]), "k", "77"),
    "alignment 0": (
        build([entry("general.alignment", 4, struct.pack("<I", 0))]),
        "general.alignment",
        "power of two",
    ),
    "alignment 48": (
        build([entry("general.alignment", 4, struct.pack("<I", 48))]),
        "general.alignment",
        "power of two",
    ),
    "alignment text": (
        build([entry("general.alignment", 8, text("32"))]),
        "general.alignment",
        "whole number",
    ),
    "rank 0": (build(tensors=[tensor("t", ())], counts=(1, 0)), "tensor t, dimensions", "0"),
    "rank 5": (build(tensors=[tensor("t", (1,) * 5)]), "tensor t, dimensions", "5"),
    "dimension 0": (build(tensors=[tensor("t", (32, 0))]), "tensor t, shape", "dimension of 0"),
    "overflow": (build(tensors=[tensor("t", (1 << 32, 1 << 32))]), "tensor t, shape", "more than"),
    "huge": (build(tensors=[tensor("t", (HUGE,) * 4)]), "tensor t, shape", "more than"),
    "half block": (build(tensors=[tensor("t", (31,), 8)]), "tensor t, shape", "blocks of 32"),
    "type": (build(tensors=[tensor("t", kind=4711)]), "tensor t, type", "4711 is unknown"),
    "no kernel": (build(tensors=[tensor("t", kind=10)]), "tensor t, type", "Q2_K"),
    "unaligned": (build(tensors=[tensor("t", offset=4)]), "tensor t, offset", "multiple of 32"),
    "past the end": (build(tensors=[tensor("t", offset=256)]), "tensor t, offset", "end past"),
    "offset": (build(tensors=[tensor("t", offset=HUGE)]), "tensor t, offset", "end past"),
    "truncated": (build(tensors=[tensor("t")], data=100), "tensor t, offset", "end past"),
    "overlap": (
        build(tensors=[tensor("t", (64,)), tensor("u", offset=128)]),
        "tensor u, offset",
        "overlap those of tensor t",
    ),
    "duplicate": (build(tensors=[tensor("t"), tensor("t", offset=128)]), "tensor t", "twice"),
    "name": (build(tensors=[tensor(b"\xc3")]), "name of a tensor", "UTF-8"),
    "name length": (
        build(tensors=[struct.pack("<Q", HUGE) + b"\0" * 60], counts=(1, 0)),
        "name of a tensor",
        "a length",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_one_bad_field(read, case: str) -> None:  # type: ignore[no-untyped-def]
    content, field, why = BAD[case]
    with pytest.raises(CheckpointError) as caught:
        read(content)
    error = caught.value
    assert "made.gguf" in error.what
    assert field in error.what
    assert why in error.why
    assert error.remedy
    assert error.exit_code == 2
    assert not any("\n" in line for line in (error.what, error.why, error.remedy))


def test_control_characters_of_a_file_stay_out_of_errors(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError) as caught:
        read(build(tensors=[tensor("t\x1b[31m\n" + "x" * 500, kind=4711)]))
    assert "\x1b" not in str(caught.value)
    assert len(caught.value.what) < 400


def test_counts_cost_no_memory(tmp_path: Path) -> None:
    """A file of 64 MiB that claims to hold millions of things is refused without making them."""
    path = tmp_path / "claims.gguf"
    path.write_bytes(build(counts=(1 << 21, 1 << 21)))
    os.truncate(path, 1 << 26)
    mapped = map_file(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(mapped)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_versions_2_and_3_are_the_same(read) -> None:  # type: ignore[no-untyped-def]
    for version in (2, 3):
        header = read(build(tensors=[tensor("t")], version=struct.pack("<I", version)))
        assert header.version == version
        assert header.tensors[0].shape == (32,)


def test_metadata_equals_the_oracle(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_array("texts", ["x", "", "日本"])
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_array("flags", [True, False])
    writer.add_uint64("large", 1 << 63)
    writer.add_int8("small", -128)
    writer.add_float64("double", 0.1)
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(map_file(path))
    reader = gguf.GGUFReader(path)
    assert header.tensors[0].offset == reader.tensors[0].data_offset
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata.plain() == theirs


@pytest.mark.parametrize("what", ["empty", "folder", "missing", "pipe", "nul", "device"])
def test_paths_that_are_no_model(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.gguf"
    if what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no named pipes")
        os.mkfifo(path)
    elif what == "nul":
        path = tmp_path / "mod\0el.gguf"
    elif what == "device":
        path = Path(os.devnull)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path.name) in caught.value.what
    assert caught.value.remedy


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build())
    path.chmod(0)
    with pytest.raises(CheckpointError, match="may not be read"):
        open_checkpoint(path)


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(build())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "some.gguf" in caught.value.remedy
