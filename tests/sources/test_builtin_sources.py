"""The built-in sources: every view and every copy has the file's bytes; damage is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import strata_core
from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import CheckpointError, StrataError
from strata_core.interfaces import Expert, Source
from strata_core.memory.address import bytes_at
from strata_core.memory.host import HostAllocator
from strata_core.sources.arena import Arena
from strata_core.sources.mmap import MappedFile
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub


class Counting:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.wanted = 0
        self.moved = 0

    def start(self, label: str, nbytes: int) -> None:
        self.wanted += nbytes

    def advance(self, nbytes: int) -> None:
        self.moved += nbytes

    def done(self) -> None:
        pass


def make_arena(checkpoint: Checkpoint) -> Source:
    progress = Counting()
    source = Arena(checkpoint.experts, HostAllocator(), progress)
    assert progress.moved == progress.wanted > 0
    return source


def make_mapped(checkpoint: Checkpoint) -> Source:
    return MappedFile(checkpoint.experts)


MAKERS = [make_arena, make_mapped]
FORMS = ["gguf", "split gguf", "hub", "sharded hub"]


def write(form: str, folder: Path) -> Path:
    hyper = tiny_hyper(experts=5, layers=3, dense_layers=frozenset({1}))
    path = folder / "m.gguf"
    if form == "gguf":
        write_tiny_gguf(path, hyper=hyper, expert_type="Q5_K")
    elif form == "split gguf":
        write_tiny_gguf(path, hyper=hyper, shard_tensors=7)
        return sorted(folder.glob("*.gguf"))[0]
    else:
        write_tiny_hub(folder / "m", hyper=hyper, shards=3 if form == "sharded hub" else 1)
        return folder / "m"
    return path


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_expert_has_the_files_bytes(
    make: Callable[[Checkpoint], Source], form: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write(form, tmp_path))
    source = make(checkpoint)
    for layer, layout in checkpoint.experts.layouts.items():
        source.begin_layer(layer, range(checkpoint.experts.count))
        for index in range(checkpoint.experts.count):
            expert = Expert(layer, index)
            raw = [
                piece.file.read_bytes()[piece.offset : piece.offset + piece.nbytes]
                for piece in checkpoint.experts.pieces(expert)
            ]
            view = source.view(expert)
            seen = [
                bytes_at(address, part.nbytes).tobytes()
                for address, part in zip(view.parts, layout.parts, strict=True)
            ]
            assert seen == raw
            buffer = bytearray(-(-layout.nbytes // 4096) * 4096 + 4096)
            pad = source.read_into(expert, memoryview(buffer))
            assert bytes(buffer[pad : pad + layout.nbytes]) == b"".join(raw)
            source.release(expert)
    source.close()
    source.close()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("expert", [Expert(1, 0), Expert(0, 5), Expert(0, -1), Expert(9, 0)])
def test_an_expert_that_is_none_is_an_error(
    make: Callable[[Checkpoint], Source], expert: Expert, tmp_path: Path
) -> None:
    source = make(open_checkpoint(write("gguf", tmp_path)))
    with pytest.raises(StrataError, match=f"{expert.index} of layer {expert.layer}"):
        source.view(expert)
    source.close()


def test_a_closed_arena_says_so(tmp_path: Path) -> None:
    source = make_arena(open_checkpoint(write("gguf", tmp_path)))
    source.close()
    with pytest.raises(StrataError, match="closed"):
        source.view(Expert(0, 0))


def test_a_file_that_shrinks_while_it_is_read_names_expert_and_file(tmp_path: Path) -> None:
    path = write("gguf", tmp_path)
    checkpoint = open_checkpoint(path)
    piece = checkpoint.experts.pieces(Expert(2, 4))[2]
    with path.open("r+b") as file:
        file.truncate(piece.offset + piece.nbytes - 1)
    allocator = HostAllocator()
    with pytest.raises(StrataError, match="of layer 2") as caught:
        Arena(checkpoint.experts, allocator, Counting())
    assert str(path) in str(caught.value)
    assert allocator._maps == {}, "what was reserved was not given back"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("source", ["arena", "mmap"])
def test_an_exponent_that_is_no_number_names_the_expert(
    source: str, backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=2, top_k=2), expert_type="MXFP4")
    piece = open_checkpoint(path).experts.pieces(Expert(1, 1))[1]
    data = bytearray(path.read_bytes())
    data[piece.offset + 17 * 3] = 255
    path.write_bytes(data)

    def use() -> None:
        with strata_core.load(path, backend=backend, source=source) as model:
            model.logits([1, 2, 3])

    with pytest.raises(CheckpointError, match="expert 1 of layer 1"):
        use()


def test_the_views_of_a_mapped_file_are_the_mapping(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write("gguf", tmp_path))
    source = make_mapped(checkpoint)
    mapped = checkpoint.experts.mapped(Expert(0, 3))
    assert source.view(Expert(0, 3)).parts == tuple(m.ctypes.data for m in mapped)
    assert not any(m.flags.writeable for m in mapped)
    assert isinstance(mapped[0], np.ndarray)
