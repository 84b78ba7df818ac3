from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.checkpoint.scales import check_numbers, check_scales
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError
from strata_core.kernels.dequantise import CHUNK, dequantise, unpack

QUANTISED = [name for name, kind in TYPES.items() if kind.block > 1]


def oracle(name: str, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(data, gguf.GGMLQuantizationType[name]).ravel()


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits, except that any two values that are not numbers are equal."""
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 70))
@settings(max_examples=15, deadline=None)
def test_random_bytes_equal_the_oracle(name: str, seed: int, blocks: int) -> None:
    kind = TYPES[name]
    data = np.random.default_rng(seed).integers(0, 256, blocks * kind.block_bytes, np.uint8)
    ours = dequantise(name, data, (blocks, kind.block))
    assert_same_bits(ours.ravel(), oracle(name, data))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("more", [-1, 0, 1, 999])
def test_any_number_of_chunks_gives_the_same_bits(name: str, more: int) -> None:
    kind = TYPES[name]
    blocks = 2 * CHUNK // kind.block + more
    data = np.random.default_rng(more + 2).integers(0, 256, blocks * kind.block_bytes, np.uint8)
    ours = dequantise(name, data, (blocks * kind.block,))
    assert_same_bits(ours, oracle(name, data))


@pytest.mark.parametrize("name", TYPES)
def test_little_is_held_beside_the_result(name: str) -> None:
    kind = TYPES[name]
    shape = (1024, 4096)
    data = np.zeros(kind.nbytes(shape[0] * shape[1]), np.uint8)
    dequantise(name, data[: kind.block_bytes], (kind.block,))
    tracemalloc.start()
    try:
        result = dequantise(name, data, shape)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.nbytes <= peak < result.nbytes + 4 * 4 * CHUNK


def test_every_mxfp4_exponent() -> None:
    nibbles = (np.arange(16, dtype=np.uint8) << 4) | np.arange(16, dtype=np.uint8)
    for exponent in range(256):
        data = np.concatenate([np.array([exponent], np.uint8), nibbles])
        assert_same_bits(dequantise("MXFP4", data, (32,)), oracle("MXFP4", data))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K"])
def test_unaligned_input(name: str) -> None:
    size = TYPES[name].block_bytes
    padded = np.random.default_rng(1).integers(0, 256, size + 1, np.uint8)
    shape = (TYPES[name].block,)
    assert_same_bits(dequantise(name, padded[1:], shape), oracle(name, padded[1:].copy()))


@pytest.mark.parametrize("name", QUANTISED)
def test_unpacked_integers_are_in_range(name: str) -> None:
    kind = TYPES[name]
    data = np.random.default_rng(5).integers(0, 256, 64 * kind.block_bytes, np.uint8)
    blocks = unpack(name, data)
    count = 64 * kind.block // 32
    assert blocks.q.dtype == np.int8
    assert blocks.q.shape == (count, 32)
    assert blocks.d.shape == (count,)
    limits = {"Q8_0": 128, "Q6_K": 32, "MXFP4": 12, "Q5_0": 16, "Q4_0": 8}
    assert np.abs(blocks.q.astype(int)).max() <= limits.get(name, 31)


@pytest.mark.shared
@pytest.mark.parametrize("file", ["kjv-Q8_0", "kjv-Q4_0", "kjv-Q4_K_M", "kjv-MXFP4"])
def test_given_files_equal_the_oracle(models: Path, file: str) -> None:
    checkpoint = open_checkpoint(models / "kjv-moe" / f"{file}.gguf")
    layer = checkpoint.hyper.layers - 1
    stacks = [stack for stack in checkpoint.experts.stored[layer] if not isinstance(stack, tuple)]
    assert len(stacks) == 3
    for tensor in [*checkpoint.tensors.values(), *stacks]:
        ours = dequantise(tensor.type.name, tensor.data, tensor.shape)
        assert_same_bits(ours.ravel(), oracle(tensor.type.name, tensor.data))


def test_exponent_255_is_refused_by_name() -> None:
    data = np.zeros(3 * 17, np.uint8)
    check_scales("MXFP4", data, "expert 3 of layer 1")
    data[17] = 255
    with pytest.raises(CheckpointError, match=r"expert 3 of layer 1: 1 MXFP4") as caught:
        check_scales("MXFP4", data, "expert 3 of layer 1")
    assert "block 1" in caught.value.why
    check_scales("Q8_0", np.full(34, 255, np.uint8), "anything")


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_what_unpacks_to_no_number_is_found(name: str, seed: int, blocks: int) -> None:
    """As the oracle sees it: a block is named where any of its weights is no finite number."""
    kind = TYPES[name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, blocks * kind.block_bytes, dtype=np.uint8)
    if name == "MXFP4":
        values = np.where(data.reshape(blocks, -1)[:, :1] == 255, np.nan, np.float32(0))
    else:
        values = oracle(name, data).reshape(blocks, kind.block)
    with np.errstate(all="ignore"):
        bad = np.flatnonzero(~np.isfinite(values).all(1))
    if not len(bad):
        check_numbers(name, data, "tensor x")
        return
    with pytest.raises(CheckpointError, match=f"tensor x: {len(bad)} {name} ") as caught:
        check_numbers(name, data, "tensor x")
    assert f" {bad[0]}" in caught.value.why


def test_bytes_and_shape_must_agree() -> None:
    with pytest.raises(ValueError, match="do not make the shape"):
        dequantise("Q8_0", np.zeros(34, np.uint8), (64,))
    with pytest.raises(CheckpointError, match="Q2_K"):
        dequantise("Q2_K", np.zeros(84, np.uint8), (256,))
    with pytest.raises(CheckpointError, match="whole number of blocks"):
        dequantise("Q8_0", np.zeros(34, np.uint8), (3, 11))
