"""Damaged GGUF files: the outcome is a Checkpoint or a CheckpointError, soon, in little memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.tokenizer import open_tokenizer

HYPER = tiny_hyper(experts=16, top_k=4, layers=1)
MEMORY = 16 << 20
SECONDS = 2.0
ABSURD = st.sampled_from(
    [
        *(0, 1, 3, 0x7F, 0xFF, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
        *(1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    ]
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A path to write mutants to, a valid file's bytes, and the length of its header."""
    path = tmp_path_factory.mktemp("fuzz") / "valid.gguf"
    write_tiny_gguf(path, hyper=HYPER, tokenizer=True)
    header = open_checkpoint(path).header_bytes[0]
    return path.with_name("mutant.gguf"), path.read_bytes(), header


def examine(path: Path, content: bytes) -> bool:
    """Open and use a mutant within the limits; whether it was accepted."""
    path.write_bytes(content)
    tracemalloc.start()
    began = time.thread_time()  # a busy machine is not the file's fault
    try:
        checkpoint = open_checkpoint(path)
        # What was accepted must be safe to use.
        for tensor in checkpoint.tensors.values():
            assert tensor.data.size == tensor.nbytes
            assert tensor.offset + tensor.nbytes <= len(content)
        for layer, layout in checkpoint.experts.layouts.items():
            views = checkpoint.experts.mapped(Expert(layer, checkpoint.experts.count - 1))
            assert sum(view.size for view in views) == layout.nbytes
        checkpoint.metadata()
        tokenizer = open_tokenizer(checkpoint)
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode("a b<|endoftext|>"))
        return True
    except CheckpointError:
        return False
    finally:
        elapsed = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY
        assert elapsed < SECONDS


fuzz = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_the_valid_file_is_accepted(valid: tuple[Path, bytes, int]) -> None:
    path, content, _ = valid
    assert examine(path, content)


@fuzz
@given(data=st.data())
def test_bit_flips_in_the_header(valid: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, content, header = valid
    mutant = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, header * 8 - 1), min_size=1, max_size=8)):
        mutant[at // 8] ^= 1 << (at % 8)
    examine(path, bytes(mutant))


@fuzz
@given(data=st.data())
def test_truncations(valid: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, content, header = valid
    length = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(content) - 1)))
    assert not examine(path, content[:length])


@fuzz
@given(data=st.data(), value=ABSURD, size=st.sampled_from(["<I", "<Q"]))
def test_absurd_integers(
    valid: tuple[Path, bytes, int], data: st.DataObject, value: int, size: str
) -> None:
    path, content, header = valid
    raw = struct.pack(size, value & ((1 << 8 * struct.calcsize(size)) - 1))
    mutant = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, header - 8), min_size=1, max_size=2)):
        mutant[at : at + len(raw)] = raw
    examine(path, bytes(mutant))


@fuzz
@given(data=st.data())
def test_pieces_moved_about(valid: tuple[Path, bytes, int], data: st.DataObject) -> None:
    """Bytes cut out, doubled or inserted shift every later field."""
    path, content, header = valid
    start = data.draw(st.integers(0, header))
    length = data.draw(st.integers(1, 200))
    kind = data.draw(st.sampled_from(["cut", "double", "insert"]))
    middle = {
        "cut": b"",
        "double": content[start : start + length] * 2,
        "insert": data.draw(st.binary(max_size=64)) + content[start : start + length],
    }[kind]
    examine(path, content[:start] + middle + content[start + length :])


@fuzz
@given(content=st.binary(max_size=400))
def test_arbitrary_bytes_after_the_magic(valid: tuple[Path, bytes, int], content: bytes) -> None:
    path, _, _ = valid
    assert not examine(path, b"GGUF\x03\0\0\0" + content)


def test_every_length_of_the_header(valid: tuple[Path, bytes, int]) -> None:
    """Each truncation inside the first kilobyte of the header, one by one."""
    path, content, _ = valid
    for length in range(1, 1024):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        open_checkpoint(path)
