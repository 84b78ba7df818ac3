"""Conversion, the index, damage, and tokens that are those of the plain pack."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, StrataError, UsageError
from strata_core.interfaces import Expert
from strata_source_zstd.archive import INDEX, STRIDES, open_archive, restore, shuffled
from strata_source_zstd.command import main
from strata_source_zstd.convert import convert, measure
from strata_source_zstd.source import Frames


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.integers(1, 300), st.integers(0, 100))
def test_the_order_of_bytes_is_undone(data: bytes, stride: int, dropped: int) -> None:
    blob = np.frombuffer(data, np.uint8)
    moved = shuffled(blob, stride)
    assert sorted(moved.tobytes()) == sorted(data)
    target = np.zeros(max(0, len(data) - dropped), np.uint8)
    restore(moved, stride, target)
    assert target.tobytes() == data[: len(target)]


def test_shuffled_puts_equal_places_of_blocks_together() -> None:
    assert shuffled(np.arange(8, dtype=np.uint8), 3).tolist() == [0, 3, 1, 4, 2, 5, 6, 7]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_every_blob_comes_back(kind: str, make_pack) -> None:
    plain, packed = make_pack(kind)
    found = open_checkpoint(packed)
    assert found.form == "zstd"
    assert not (packed / "experts.bin").exists()
    whole = open_checkpoint(plain)
    assert found.model_hash == whole.model_hash
    frames = Frames(open_archive(packed), found.experts)
    for layer, layout in found.experts.layouts.items():
        for index in range(found.experts.count):
            buffer = bytearray(layout.nbytes)
            frames.fetch([Expert(layer, index)], [memoryview(buffer)])
            expected = b"".join(v.tobytes() for v in whole.experts.mapped(Expert(layer, index)))
            assert bytes(buffer) == expected


def test_tokens_are_those_of_the_plain_pack(tmp_path: Path, strata) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    strata("pack", "demo", str(plain))
    convert(plain, packed, report=lambda _line: None)
    call = ("-n", "24", "In the beginning")
    before = strata("generate", str(plain), *call)
    for memory in ("1", "0"):
        after = strata("generate", str(packed), *call, "--zstd-memory", memory)
        names = {item["role"]: item["name"] for item in after["selections"]}
        assert names["source"] == "zstd"
        assert after["first_logits_sha256"] == before["first_logits_sha256"]
        assert after["token_ids"] == before["token_ids"]


def test_settings_are_checked_and_named(tmp_path: Path, make_pack, strata) -> None:
    _, packed = make_pack()
    error = strata("generate", str(packed), "x", "--zstd-threads", "0", code=2)["error"]
    assert "--zstd-threads" in error["what"]
    assert "strata-source-zstd 0.1.0 declares it" in error["why"]


def test_a_conversion_is_whole_or_not_there(tmp_path: Path, make_pack) -> None:
    plain, packed = make_pack()
    with pytest.raises(UsageError, match="exists already"):
        convert(plain, packed, report=lambda _line: None)
    with pytest.raises(UsageError, match="not a pack"):
        convert(packed, tmp_path / "again", report=lambda _line: None)

    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plain, tmp_path / "third", report=stop)
    assert not list(tmp_path.glob("*third*"))
    assert not list(tmp_path.glob(".third*"))


def edit(packed: Path, change) -> None:
    path = packed / INDEX
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


INDEXES = {
    "format": lambda d: d.update(format="x"),
    "version": lambda d: d.update(version=2),
    "bytes": lambda d: d.update(bytes=d["bytes"] - 1),
    "no layers": lambda d: d.update(layers={}),
    "a layer's name": lambda d: d["layers"].update(x={}),
    "a frame outside": lambda d: d["layers"]["0"]["frames"][0].__setitem__(0, d["bytes"]),
    "a frame below": lambda d: d["layers"]["0"]["frames"][0].__setitem__(0, -1),
    "a frame of text": lambda d: d["layers"]["0"]["frames"][0].__setitem__(1, "9"),
    "an order of none": lambda d: d["layers"]["0"].update(stride=0),
    "a size of none": lambda d: d["layers"]["0"].update(size=True),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_cannot_be_right_is_refused(case: str, make_pack) -> None:
    _, packed = make_pack()
    edit(packed, INDEXES[case])
    with pytest.raises(CheckpointError, match="cannot be used"):
        open_archive(packed)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["layers"]["0"]["frames"].pop(),
        lambda d: d["layers"].pop("1"),
        lambda d: d["layers"]["2"].update(size=4096),
    ],
)
def test_an_archive_of_another_pack_is_refused(change, make_pack) -> None:
    _, packed = make_pack()
    edit(packed, change)
    with pytest.raises(CheckpointError, match="not that of this pack"):
        Frames(open_archive(packed), open_checkpoint(packed).experts)


def test_damage_and_a_vanished_file_name_the_expert(make_pack) -> None:
    _, packed = make_pack()
    archive = open_archive(packed)
    found = open_checkpoint(packed).experts
    frames = Frames(archive, found)
    buffer = memoryview(bytearray(found.layouts[0].nbytes))
    at, size = archive.place(Expert(0, 2))
    data = bytearray(archive.path.read_bytes())
    data[at + size // 2] ^= 0x40
    archive.path.write_bytes(data)
    with pytest.raises(StrataError, match="expert 2 of layer 0"):
        frames.fetch([Expert(0, 2)], [buffer])
    frames.fetch([Expert(0, 1)], [buffer])
    archive.path.write_bytes(data[: at + size // 2])
    with pytest.raises(StrataError, match=r"ends .* bytes too soon"):
        frames.fetch([Expert(0, 2)], [buffer])
    frames.fetch([Expert(0, 1)], [buffer])
    archive.path.unlink()
    with pytest.raises(StrataError, match="cannot read expert 1 of layer 0"):
        frames.fetch([Expert(0, 1)], [buffer])


def test_the_command_reports_ratio_and_rates(tmp_path: Path, make_pack, capsys) -> None:
    plain, _ = make_pack()
    assert main(["convert", str(plain), str(tmp_path / "out"), "--level", "1"]) == 0
    shown = capsys.readouterr()
    assert "bytes of experts became" in shown.out
    assert shown.err.count("layer ") == 3
    found = measure(tmp_path / "out", 2)
    assert found.raw > found.packed
    assert min(found.processor, found.one_thread, found.all_threads) > 0
    assert main(["measure", str(tmp_path / "out")]) == 0
    assert "MB/s by one thread" in capsys.readouterr().out
    assert main(["convert", str(tmp_path), str(tmp_path / "none")]) == 2
    assert "not a pack" in capsys.readouterr().err


def test_orders_are_tried_from_none_on() -> None:
    assert STRIDES[0] == 1
    assert list(STRIDES) == sorted(set(STRIDES))
