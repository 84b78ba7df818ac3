"""Blobs are checked as sources read them: which ones, what is said, and what is not possible."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.config import resolve
from strata_core.errors import CheckpointError, UsageError
from strata_core.interfaces import Expert
from strata_core.memory.host import HostAllocator
from strata_core.pack.reads import ReadCheck, in_sample
from strata_core.sources.arena import Arena


def blob_of(path: Path, expert: Expert) -> bytes:
    piece = open_checkpoint(path).experts.blob(expert)
    return piece.file.read_bytes()[piece.offset : piece.offset + piece.nbytes]


def damage(packed: Path, expert: Expert) -> int:
    """Change one byte of a blob; the blob's offset."""
    piece = open_checkpoint(packed).experts.blob(expert)
    data = bytearray(piece.file.read_bytes())
    data[piece.offset + piece.nbytes - 1] ^= 0x10
    piece.file.write_bytes(data)
    return piece.offset


def test_a_blob_is_compared_with_its_hash(packed: Path) -> None:
    experts = open_checkpoint(packed).experts
    blob = bytearray(blob_of(packed, Expert(1, 4)))
    experts.check_blob(Expert(1, 4), memoryview(blob))
    with pytest.raises(CheckpointError, match="expert 3 of layer 1 is damaged"):
        experts.check_blob(Expert(1, 3), memoryview(blob))
    blob[5] ^= 1
    with pytest.raises(CheckpointError) as caught:
        experts.check_blob(Expert(1, 4), memoryview(blob))
    offset = experts.blob(Expert(1, 4)).offset
    assert str(packed / "experts.bin") in caught.value.why
    assert f"at offset {offset}" in caught.value.why


def test_the_sample_is_fixed_and_about_one_in_64() -> None:
    chosen = [(layer, i) for layer in range(48) for i in range(128) if in_sample(Expert(layer, i))]
    assert {(layer, 0) for layer in range(48)} <= set(chosen)
    others = [place for place in chosen if place[1]]
    assert 48 * 127 / 64 * 0.6 < len(others) < 48 * 127 / 64 * 1.6
    assert len({layer for layer, _ in others}) > 30
    assert len({index for _, index in others}) > 30
    # The same blobs in every run and version: a fixed function of layer and index.
    spelled = repr(chosen).encode()
    assert hashlib.sha256(spelled).hexdigest()[:16] == "0aa8bb845908d4a1"


@pytest.mark.parametrize("mode", ["all", "sample", "off"])
def test_the_modes(mode: str, packed: Path) -> None:
    experts = open_checkpoint(packed).experts
    check = ReadCheck.of(experts, {"verify_reads": mode})
    places = [Expert(layer, i) for layer in (0, 1) for i in range(5)]
    wanted = {"all": places, "sample": [e for e in places if in_sample(e)], "off": []}[mode]
    assert [expert for expert in places if check.wants(expert)] == wanted
    for expert in places:
        wrong = memoryview(bytes(8))
        if expert in wanted:
            with pytest.raises(CheckpointError, match=str(expert)):
                check.check(expert, wrong)
        else:
            check.check(expert, wrong)


def test_a_sample_is_the_default_and_other_forms_have_nothing_to_check(
    packed: Path, model: Path
) -> None:
    assert ReadCheck.of(open_checkpoint(packed).experts, {}).mode == "sample"
    assert resolve({}, {}).verify_reads == "sample"
    unhashed = ReadCheck.of(open_checkpoint(model).experts, {"verify_reads": "all"})
    assert not unhashed.wants(Expert(0, 0))
    unhashed.check(Expert(0, 0), memoryview(b"anything"))


def test_an_arena_of_a_damaged_pack_names_expert_file_and_offset(packed: Path) -> None:
    spared = next(Expert(1, i) for i in range(5) if not in_sample(Expert(1, i)))
    offset = damage(packed, spared)
    checkpoint = open_checkpoint(packed)
    allocator = HostAllocator()

    class Silent:
        def start(self, label: str, nbytes: int) -> None:
            pass

        def advance(self, nbytes: int) -> None:
            pass

        def done(self) -> None:
            pass

    def arena(mode: str) -> Arena:
        check = ReadCheck.of(checkpoint.experts, {"verify_reads": mode})
        return Arena(checkpoint.experts, allocator, Silent(), check)

    with pytest.raises(CheckpointError, match=str(spared)) as caught:
        arena("all")
    assert f"{packed / 'experts.bin'} at offset {offset}" in caught.value.why
    assert allocator._maps == {}, "what was reserved was not given back"
    for mode in ("sample", "off"):
        arena(mode).close()
    damage(packed, Expert(0, 0))
    with pytest.raises(CheckpointError, match="expert 0 of layer 0"):
        arena("sample")
    arena("off").close()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_setting_reaches_the_source(backend: str, packed: Path) -> None:
    damage(packed, Expert(0, 3))
    with pytest.raises(CheckpointError, match="expert 3 of layer 0"):
        strata_core.load(packed, backend=backend, source="arena", verify_reads="all")
    with strata_core.load(packed, backend=backend, source="arena", verify_reads="off") as loaded:
        assert not any("verify-reads" in item.what for item in loaded.degradations)


def whats(path: Path, **options: str) -> list[str]:
    with strata_core.load(path, backend="reference", **options) as loaded:
        return [item.what for item in loaded.degradations if "verify-reads" in item.what]


def test_what_was_asked_for_and_cannot_be_had_is_said(packed: Path, model: Path) -> None:
    nothing = ["--verify-reads all checks nothing"]
    assert whats(model, verify_reads="all") == nothing
    assert whats(packed, verify_reads="all", source="mmap") == nothing
    assert whats(packed, verify_reads="all", source="arena") == []
    assert whats(model, verify_reads="off") == whats(model) == whats(packed, source="mmap") == []


def test_other_values_are_refused() -> None:
    with pytest.raises(UsageError, match="verify-reads"):
        resolve({"verify_reads": "some"}, {})


# --- what is told ------------------------------------------------------------------------------


def told(path: Path, **options: str) -> dict[str, object]:
    with strata_core.load(path, backend="cpu", **options) as loaded:
        loaded.logits([1, 2, 3])
        return loaded.reads


@pytest.mark.parametrize("source", ["arena", "tiered-file"])
def test_what_was_compared_is_counted(source: str, packed: Path, model: Path) -> None:
    every = [Expert(layer, i) for layer in (0, 1) for i in range(5)]
    sampled = sum(in_sample(expert) for expert in every)
    assert told(packed, source=source, verify_reads="off") == {
        "verify": "off",
        "compared": 0,
        "damaged": 0,
    }
    assert told(packed, source=source)["compared"] == sampled
    assert told(packed, source=source, verify_reads="all")["compared"] == 10
    assert told(packed, source="mmap", verify_reads="all")["compared"] == 0
    assert told(model, source=source) == {"verify": "sample", "compared": None, "damaged": None}


def test_a_damaged_blob_is_counted_too(packed: Path) -> None:
    experts = open_checkpoint(packed).experts
    with pytest.raises(CheckpointError, match="damaged"):
        experts.check_blob(Expert(0, 1), memoryview(b"other bytes"))
    assert (experts.compared.blobs, experts.compared.damaged) == (1, 1)
