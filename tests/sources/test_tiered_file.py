"""The tiered file by itself: the order of filling, faults, the file cache, counters."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, StrataError
from strata_core.interfaces import Expert, Piece
from strata_core.memory.address import bytes_at
from strata_core.memory.host import HostAllocator
from strata_core.memory.platform import direct
from strata_core.memory.platform.direct import PosixDirect, open_direct
from strata_core.pack.reads import ReadCheck
from strata_core.pack.write import write_pack
from strata_core.sources.reading import CHUNK, ExpertReader, place
from strata_core.sources.tier_sizes import placings, ring_sizes, tier_order
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

from .tier_bench import Faults, Silent, everything, make, raw, seen, tiny


def serve(source, checkpoint, experts) -> None:
    """Ask for experts layer by layer, and compare every one with the file."""
    for layer in checkpoint.experts.layouts:
        wanted = [expert.index for expert in experts if expert.layer == layer]
        source.begin_layer(layer, wanted)
        for index in wanted:
            expert = Expert(layer, index)
            assert seen(checkpoint, expert, source.view(expert)) == raw(checkpoint, expert)
        for index in wanted:
            source.release(Expert(layer, index))


def test_parts_that_follow_each_other_are_one_range() -> None:
    file = Path("f")
    whole = place((Piece(file, 5000, 100), Piece(file, 5100, 8000), Piece(file, 13100, 5)))
    (only,) = whole.ranges
    assert (only.offset, only.nbytes, only.wanted) == (4096, 12288, 9009)
    assert whole.parts == (904, 1004, 9004)
    apart = place((Piece(file, 0, 4096), Piece(file, 4097, 1), Piece(Path("g"), 4098, 4096)))
    assert [(r.offset, r.nbytes, r.at) for r in apart.ranges] == [
        *((0, 4096, 0), (4096, 4096, 4096), (4096, 8192, 8192)),
    ]
    assert apart.parts == (0, 4097, 8194)
    assert apart.nbytes == 16384


@pytest.mark.parametrize("form", ["gguf", "hub", "pack"])
@pytest.mark.parametrize("kept", [0, 1, 7, 18])
def test_every_expert_from_tier_or_file(form: str, kept: int, tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    if form == "hub":
        write_tiny_hub(tmp_path / "h", hyper=tiny_hyper(experts=6, layers=3), shards=2)
        checkpoint = open_checkpoint(tmp_path / "h")
    elif form == "pack":
        write_pack(checkpoint, tmp_path / "p", _NoBar())
        checkpoint = open_checkpoint(tmp_path / "p")
        assert all(placing.whole for placing in placings(checkpoint.experts).values())
    allocator = HostAllocator()
    check = ReadCheck.of(checkpoint.experts, {"verify_reads": "all"})
    source = make(checkpoint, kept, allocator=allocator, check=check, verify=True)
    assert source.kept == frozenset(tier_order(None, (), checkpoint.experts)[:kept])
    for _ in range(2):
        serve(source, checkpoint, everything(checkpoint))
    counts = source.counters()["file"]
    assert counts["verified"] == counts["experts"] >= 18
    assert counts["differ"] == 0
    source.close()
    assert allocator._maps == {}


class _NoBar(Silent):
    def tell(self, text: str) -> None:
        pass


def test_the_tier_is_filled_by_rank_and_then_from_the_caches_tail(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    ranking = everything(checkpoint)[::-1]
    excluded = ranking[:4]
    order = tier_order(ranking, frozenset(excluded), checkpoint.experts)
    assert order == [*ranking[4:], *excluded[::-1]]
    source = make(checkpoint, 16, ranking=ranking, excluded=excluded)
    assert source.kept == frozenset(ranking[4:]) | set(excluded[2:])
    source.close()


def test_the_ring_holds_what_a_layer_can_ask_for(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    placed = placings(checkpoint.experts)
    largest = max(each.nbytes for each in placed.values())
    kept = [Expert(0, 0), Expert(0, 1), Expert(1, 0), Expert(2, 5)]
    assert ring_sizes(checkpoint.experts, placed, kept, moving=False) == [largest] * 5
    assert ring_sizes(checkpoint.experts, placed, kept, moving=True) == [largest] * 6
    assert ring_sizes(checkpoint.experts, placed, everything(checkpoint), moving=False) == []


def test_a_layers_misses_are_read_at_the_same_time(tmp_path: Path) -> None:
    checkpoint, faults = tiny(tmp_path), Faults()
    source = make(checkpoint, 0, opener=faults.open)
    source.begin_layer(1, [0, 2, 5])
    views = [source.view(Expert(1, index)) for index in (0, 2, 5)]
    assert len({view.parts[0] for view in views}) == 3
    read = len(faults.reads)
    source.begin_layer(1, [0, 2, 5])
    assert len(faults.reads) == read, "what is there is not read again"
    assert source.counters()["file"]["experts"] == 3
    source.close()


@pytest.mark.parametrize(
    ("kind", "why"), [("eio", os.strerror(errno.EIO)), ("end", "the file ends at byte 100")]
)
def test_a_failed_read_names_expert_and_file_and_later_ones_go_on(
    kind: str, why: str, tmp_path: Path
) -> None:
    checkpoint, faults = tiny(tmp_path), Faults()
    source = make(checkpoint, 4, opener=faults.open)
    faults.kind = kind
    source.begin_layer(2, range(6))
    for index in range(6):
        expert = Expert(2, index)
        if expert in source.kept:
            assert seen(checkpoint, expert, source.view(expert)) == raw(checkpoint, expert)
            source.release(expert)
            continue
        with pytest.raises(StrataError, match=f"cannot read {expert} from") as caught:
            source.view(expert)
        assert str(checkpoint.path) in caught.value.what
        assert why in caught.value.why
        with pytest.raises(StrataError, match=f"cannot read {expert} from"):
            source.read_into(expert, memoryview(bytearray(2 << 20)))
    faults.kind = None
    serve(source, checkpoint, everything(checkpoint))
    source.close()


def test_a_short_read_is_gone_on_with(tmp_path: Path) -> None:
    checkpoint, faults = tiny(tmp_path), Faults(kind="short")
    source = make(checkpoint, 3, opener=faults.open, verify=True)
    serve(source, checkpoint, everything(checkpoint))
    assert len(faults.reads) > 3 * len(everything(checkpoint))
    source.close()


def test_a_file_that_shrinks_or_vanishes_while_it_serves(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    pieces = {e: checkpoint.experts.pieces(e) for e in everything(checkpoint)}
    plain = {expert: raw(checkpoint, expert) for expert in pieces}
    # the plain hub file lies elsewhere, so cut a copy that nothing has mapped
    source = make(checkpoint, 1)
    first = min(pieces[expert][0].offset for expert in pieces if expert not in source.kept)
    end = max(piece.offset + piece.nbytes for row in pieces.values() for piece in row)
    middle = (first + end) // 2
    os.truncate(checkpoint.path, middle)
    served = failed = 0
    for expert, row in pieces.items():
        whole = expert in source.kept or all(p.offset + p.nbytes <= middle for p in row)
        if whole:
            assert seen(checkpoint, expert, source.view(expert)) == plain[expert]
            source.release(expert)
            served += 1
        else:
            with pytest.raises(StrataError, match=f"the file ends at byte {middle}"):
                source.view(expert)
            failed += 1
    assert served > 1
    assert failed > 1
    checkpoint.path.unlink()
    expert = next(e for e in pieces if e in source.kept)
    assert seen(checkpoint, expert, source.view(expert)) == plain[expert]
    source.close()


def test_what_fails_while_the_tier_is_filled_leaves_nothing(tmp_path: Path) -> None:
    checkpoint, allocator = tiny(tmp_path), HostAllocator()
    with pytest.raises(StrataError, match="cannot read expert 0 of layer 0"):
        make(checkpoint, 5, allocator=allocator, opener=Faults(kind="eio").open)
    assert allocator._maps == {}
    checkpoint.path.unlink()
    with pytest.raises(StrataError, match="cannot open") as caught:
        make(checkpoint, 5, allocator=allocator)
    assert str(checkpoint.path) in caught.value.what
    assert allocator._maps == {}


def test_a_damaged_blob_of_a_pack_is_found_when_it_is_read(tmp_path: Path) -> None:
    write_pack(tiny(tmp_path), tmp_path / "p", _NoBar())
    packed = open_checkpoint(tmp_path / "p")
    piece = packed.experts.pieces(Expert(1, 3))[1]
    with piece.file.open("r+b") as file:
        file.seek(piece.offset + 17)
        byte = file.read(1)[0]
        file.seek(piece.offset + 17)
        file.write(bytes([byte ^ 4]))
    source = make(packed, 0, check=ReadCheck.of(packed.experts, {"verify_reads": "all"}))
    with pytest.raises(CheckpointError, match="expert 3 of layer 1 is damaged"):
        source.view(Expert(1, 3))
    serve(source, packed, [Expert(1, 2), Expert(1, 4)])
    source.close()


def test_a_wrong_copy_of_a_leaving_expert_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    expert = Expert(1, 1)
    source = make(checkpoint, 0, excluded=[expert], spares=1, verify=True)
    move = source.begin_demote(expert)
    assert move is not None
    assert move.parts is not None
    assert source.begin_demote(Expert(1, 2)) is None, "there was one cell"
    parts = checkpoint.experts.layouts[1].parts
    for address, part, data in zip(move.parts, parts, raw(checkpoint, expert), strict=True):
        bytes_at(address, part.nbytes)[:] = np.frombuffer(data, np.uint8)
    bytes_at(move.parts[2], 1)[0] ^= 1
    with pytest.raises(StrataError, match="the copy of expert 1 of layer 1"):
        source.commit(move)
    assert source.kept == frozenset()
    assert source.counters()["file"]["differ"] == 1
    assert source.begin_demote(expert) is not None, "its cell is free again"
    source.close()


def test_more_views_than_cells_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    source = make(checkpoint, 0)
    for index in range(6):
        source.view(Expert(0, index))
    with pytest.raises(StrataError, match="no room to read expert 0 of layer 1"):
        source.view(Expert(1, 0))
    source.release(Expert(0, 3))
    serve(source, checkpoint, [Expert(1, 0)])
    with pytest.raises(StrataError, match="given back more often"):
        source.release(Expert(1, 0))
    source.close()


# --- the system's file cache -------------------------------------------------------------------


def cached_pages(path: Path) -> int:
    """Pages of a file in the system's cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = -(-len(mapped) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        assert libc.mincore(address, length, flags) == 0
        del view
        return sum(flag & 1 for flag in flags)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_reads_leave_the_file_cache_alone(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    path = checkpoint.path
    file = open_direct(path)
    refusal = file.refusal
    file.close()
    if refusal:
        pytest.skip(f"{path}: {refusal}")
    plain = {expert: raw(checkpoint, expert) for expert in everything(checkpoint)}
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before = cached_pages(path)
    source = make(checkpoint, 4)
    for expert, data in plain.items():
        assert seen(checkpoint, expert, source.view(expert)) == data
        source.release(expert)
    source.close()
    assert cached_pages(path) <= before


class Refusing(PosixDirect):
    """A file system whose descriptors refuse their first unbuffered read."""

    @classmethod
    def _proven(cls, descriptor: int) -> PosixDirect:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_a_file_system_without_unbuffered_reads_is_reported(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    found = []
    source = make(checkpoint, 2, opener=Refusing.open, degrade=found.append)
    serve(source, checkpoint, everything(checkpoint))
    source.close()
    (item,) = found
    assert item.what == "experts are read through the system's file cache"
    assert "O_DIRECT" in item.why
    assert str(checkpoint.path) in item.why


def test_an_error_that_is_no_refusal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="cannot open"):
        ExpertReader.open([tmp_path / "none"], print)
    assert direct.BLOCK == 4096
    assert CHUNK % direct.BLOCK == 0
