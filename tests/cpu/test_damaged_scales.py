"""MXFP4's exponent 255, which stands for no number: never a token from it, and the expert named."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.kernels import exact
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.testing.tiny import write_tiny_gguf

BLOCK = 17
IDS = [i * 37 % 250 for i in range(24)]


def damaged(path, expert, part):
    """A tiny model of which one block of one expert's gate (0), up or down has the exponent 255."""
    write_tiny_gguf(path, expert_type="MXFP4")
    with closing(open_checkpoint(path)) as checkpoint:
        piece = checkpoint.experts.pieces(expert)[part]
    with path.open("r+b") as file:
        file.seek(piece.offset + BLOCK * 3)
        file.write(b"\xff")


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_mapped_expert_is_named_when_it_is_first_used(tmp_path, layer, part):
    path, expert = tmp_path / "damaged.gguf", Expert(layer, 2)
    damaged(path, expert, part)
    with strata_core.load(path, source="mmap", backend="cpu", max_context=64) as model:
        with pytest.raises(CheckpointError) as caught:
            model.logits(IDS)
        assert str(expert) in caught.value.what
        assert "exponent 255" in caught.value.what


def test_an_arena_refuses_it_at_once(tmp_path):
    path, expert = tmp_path / "damaged.gguf", Expert(1, 2)
    damaged(path, expert, 1)
    with pytest.raises(CheckpointError, match="expert 2 of layer 1"):
        strata_core.load(path, source="arena", backend="cpu", max_context=64)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("zero", ["activations", "weights", "neither"])
def test_no_row_with_it_is_finite(kernels, zero, tiles):
    """Whatever it is multiplied by, and in the exact mode as well."""
    rng = np.random.default_rng(4)
    columns, rows = 352, 9
    data = rng.integers(0, 256, (rows, columns // 32, BLOCK), dtype=np.uint8)
    data[..., 0] = 120
    data[4, 5, 0] = 255
    x = rng.standard_normal((2, columns)).astype(np.float32)
    if zero == "activations":
        x[:, 160:192] = 0
    if zero == "weights":
        data[4, 5, 1:] = 0
    flat = data.reshape(-1)
    keep, xs = kernels.quantise(x, "tiles" if tiles else "rows")
    out = kernels.linear("MXFP4", flat, rows, columns // 32, 2, xs, tiles=tiles)
    assert kernels.status[0] == NOTHING_LATCHED
    wanted = exact.linear(x, exact.Matrix("MXFP4", rows, columns, flat))
    for got in (out, wanted):
        assert (np.isfinite(got) == (np.arange(rows) != 4)).all()
    others = np.arange(rows) != 4
    assert out[:, others].tobytes() == wanted[:, others].tobytes()
    del keep
