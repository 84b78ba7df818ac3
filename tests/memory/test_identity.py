"""Where page-locking leads, and how much of it there is, never changes a bit of the logits."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

EXPERTS, LAYERS = 6, 3
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
COMPLEMENT, ARENA = {"source": "sliced-pinned"}, {"source": "arena"}

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "arena": ("path 2, the arena", ARENA),
    "arena, limited": ("path 2, the arena", {**ARENA, "arena_pin_gib": 0.0003}),
    "arena, a prefix": ("prefix", {**ARENA, "partial_pin": True, "partial_pin_gib": 0.0005}),
    "path 1": ("path 1", {**COMPLEMENT, "complement_pin_gib": "all"}),
    "path 2": (
        "path 2",
        {**COMPLEMENT, "complement_pin_gib": "all", "test_complement_refuse": True},
    ),
    "path 3": ("path 3", {**COMPLEMENT, "complement_pin_gib": 0}),
    "by itself": ("path 2", COMPLEMENT),
    "within a layer": ("path 2", {**COMPLEMENT, "complement_pin_gib": 0.0004}),
    "within an expert": ("path 2", {**COMPLEMENT, "complement_pin_gib": 5 * 4096 / 2**30}),
    "a driver's limit": ("was not granted", {**COMPLEMENT, "sim_pin_budget": 0.0655}),
    "a known limit": ("STRATA_PIN_LIMIT_GIB", {**COMPLEMENT, "pin_limit_gib": 0.003}),
    "a budget": ("read from the mapped file", {**COMPLEMENT, "resident_budget_gib": 0.0006}),
    "no budget": ("0 in memory", {**COMPLEMENT, "resident_budget_gib": 0}),
}
"""Options, and what the log says of the way that they lead to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=EXPERTS, layers=LAYERS), expert_type="Q5_K")
    return path


def sha256(path: Path, **options: Any) -> str:
    with strata_core.load(path, max_context=64, threads=1, **options) as model:
        return hashlib.sha256(model.logits(IDS).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    return sha256(model, backend="cpu")


def test_the_model_is_larger_than_the_limits(model: Path) -> None:
    experts = open_checkpoint(model).experts
    blob = experts.layouts[0].nbytes
    assert 0.0003 * 2**30 < EXPERTS * blob < 0.001 * 2**30 < LAYERS * EXPERTS * blob


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [0, EXPERTS * LAYERS // 2])
def test_logits_do_not_depend_on_page_locking(
    model: Path, expected: str, way: str, cache: int, caplog
) -> None:
    caplog.set_level(logging.INFO, "strata")
    said, options = WAYS[way]
    assert sha256(model, backend="sim", sim_vram=0.05, expert_cache=cache, **options) == expected
    assert said in caplog.text
