"""Rope constants from a file: refused by name, or good for finite tables of angles."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.checkpoint.hyper import Rope
from strata_core.checkpoint.hyper_check import MAX_CONTEXT, check_hyper
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.kernels.rope import angles, frequencies
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub

YARN = {"factor": 4.0, "original_context": 128, "beta_fast": 32.0, "beta_slow": 1.0}

# Constant of a YaRN rope -> its field in a hub folder and its key in a GGUF file.
NAMES = {
    "theta": ("rope_theta", "rope.freq_base"),
    "factor": ("factor", "rope.scaling.factor"),
    "original_context": (
        "original_max_position_embeddings",
        "rope.scaling.original_context_length",
    ),
    "beta_fast": ("beta_fast", "rope.scaling.yarn_beta_fast"),
    "beta_slow": ("beta_slow", "rope.scaling.yarn_beta_slow"),
    "attention_factor": ("attention_factor", "rope.scaling.attn_factor"),
}
BAD: list[tuple[str, float]] = [
    ("theta", 1.0),
    ("theta", 0.999),
    ("theta", -10000.0),
    ("theta", 1e38),
    ("factor", 0.5),
    ("factor", 1e30),
    ("original_context", 0),
    ("beta_fast", 1e30),
    ("beta_fast", 0.5),
    ("beta_slow", 0.0),
    ("beta_slow", 1e-30),
    ("beta_slow", -1.0),
    ("attention_factor", 1e30),
    ("attention_factor", 1e-30),
    ("attention_factor", 0.0),
    ("attention_factor", -1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_gguf_file_that_cannot_be_is_named_with_its_key(tmp_path: Path, name, value) -> None:
    path = tmp_path / "m.gguf"
    metadata: dict[str, Any] = {"qwen3moe.rope.scaling.type": "yarn"}
    for other, stored in {**YARN, name: value}.items():
        metadata["qwen3moe." + NAMES[other][1]] = stored
    write_tiny_gguf(path, metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.what
    assert "qwen3moe." + NAMES[name][1] in caught.value.what


@pytest.mark.parametrize(
    ("name", "value"), [*BAD, ("beta_fast", 1e308), ("beta_slow", 1e-320), ("theta", 1e300)]
)
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_a_folder_that_cannot_be_is_named_with_its_field(tmp_path, name, value, section) -> None:
    fields = {NAMES[other][0]: stored for other, stored in {**YARN, name: value}.items()}
    config = {section: {"rope_type": "yarn", **fields}}
    write_tiny_hub(tmp_path, hyper=tiny_hyper(), config=config)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.what
    assert NAMES[name][0] in caught.value.what


class Refused(Exception):
    pass


def refuse(name: str, why: str) -> Any:
    return Refused(name, why)


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(1e-7, 1e7),
    st.sampled_from([0.0, 1.0, 1 + 2**-52, 5e-324, 1e-6, 1e6, 1e29, 1.7e308, inf, -inf, nan]),
)


@given(
    theta=st.one_of(st.just(1e4), NUMBERS),
    dim=st.sampled_from([2, 4, 64]),
    scaling=st.sampled_from(["none", "linear", "yarn"]),
    factor=st.one_of(st.just(4.0), NUMBERS),
    original_context=st.integers(-1, MAX_CONTEXT + 1),
    beta_fast=st.one_of(st.just(32.0), NUMBERS),
    beta_slow=st.one_of(st.just(1.0), NUMBERS),
    attention_factor=st.one_of(st.none(), NUMBERS),
)
def test_what_is_not_refused_gives_finite_angles(**values: Any) -> None:
    rope = Rope(**values)
    try:
        check_hyper(evolve(tiny_hyper(), rope=rope), refuse)
    except Refused:
        return
    radians, factor = frequencies(rope)
    assert radians.shape == (rope.dim // 2,)
    assert np.isfinite(radians).all()
    assert (radians > 0).all()
    assert 0 < factor < inf
    for table in angles(rope, np.array([0, 1, MAX_CONTEXT - 1])):
        assert table.dtype == np.float32
        assert np.isfinite(table).all()
    assert angles(rope, np.array([0]))[0].all()


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20))
def test_one_position_has_the_bits_of_many(positions):
    rope = Rope(dim=128, theta=1e6)
    many = angles(rope, np.array(positions))
    for row, position in enumerate(positions):
        for table, one in zip(many, angles(rope, np.array([position])), strict=True):
            assert one.shape == (1, 64)
            assert one.tobytes() == table[row].tobytes()
