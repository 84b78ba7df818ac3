"""Family files against the kernel table and the tensor roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.kernels.program import ProgramBuilder
from strata_core.kernels.reference import KERNELS as REFERENCE
from strata_core.kernels.table import KERNELS
from strata_core.model.build import FAMILIES, build_program
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub


def test_the_reference_has_every_kernel_of_the_table() -> None:
    assert REFERENCE.keys() == KERNELS.keys()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_weight_of_a_program_is_in_the_checkpoint(family: str, tmp_path: Path) -> None:
    shared = 256 if family == "qwen2_moe" else 0
    write_tiny_hub(tmp_path / family, hyper=tiny_hyper(family=family, shared_ffn=shared))
    checkpoint = open_checkpoint(tmp_path / family)
    program = build_program(checkpoint.hyper)
    assert {(w.role, w.layer) for w in program.weights()} == set(checkpoint.tensors)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"x": None, "y": None},
        {"x": 1, "y": 2},
        {"x": "x", "y": "y", "z": "z"},
    ],
)
def test_a_mistaken_kernel_call_is_refused_when_it_is_written(args: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="kernel add"):
        ProgramBuilder().emit("add", **args)


def test_a_buffer_has_one_shape() -> None:
    b = ProgramBuilder()
    assert b.buffer("x", "token", 4) is b.buffer("x", "token", 4)
    with pytest.raises(ValueError, match="buffer x"):
        b.buffer("x", "token", 5)
