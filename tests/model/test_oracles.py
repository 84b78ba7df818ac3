"""Whole models on the reference backend against logits that transformers computed in float32.

`oracles/demo.npz` (the built-in model) and `oracles/tiny_transformers_float32.npz` (transformers
5.24, `from_pretrained(..., dtype=torch.float32)`) are committed; the others lie with their models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata_core
from strata_core.api import Model
from strata_core.engine.messages import Finished
from strata_core.kernels import interpreter, rope

ORACLES = Path(__file__).with_name("oracles")
VARIANTS = ["bf16", "Q8_0", "Q4_0", "Q4_K_M", "MXFP4"]
FAMILIES = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"]


def greedy(model: Model, prompt: Any, n: int) -> list[int]:
    events = model.generate([int(i) for i in prompt], max_tokens=n, ignore_eos=True)
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return list(last.token_ids)


@pytest.fixture(scope="module", params=["arena", "mmap"])
def demo(request: pytest.FixtureRequest) -> Iterator[Model]:
    with strata_core.load("demo", backend="reference", source=request.param) as model:
        yield model


def test_demo_logits_and_greedy_tokens(demo: Model) -> None:
    """Every prompt from one source; two from the other, whose bytes are the same."""
    oracle = np.load(ORACLES / "demo.npz")
    (source,) = (each.name for each in demo.selections if each.role == "source")
    for i in range(6 if source == "mmap" else 2):
        prompt = oracle[f"prompt{i}"]
        assert np.abs(demo.logits(prompt)[-1] - oracle["logits"][i]).max() < 2e-4
        assert greedy(demo, prompt, 32) == oracle["greedy"][i].tolist()


def test_demo_perplexity(demo: Model) -> None:
    oracle = np.load(ORACLES / "demo.npz")
    result = demo.perplexity(oracle["passage"], 512)
    assert (result.tokens, result.windows, result.left_out) == (511, 1, 0)
    assert abs(result.nll - float(oracle["nll"])) < 1e-5


def kjv_path(models: Path, variant: str) -> Path:
    folder = models / "kjv-moe"
    return folder if variant == "bf16" else folder / f"kjv-{variant}.gguf"


@pytest.mark.shared
@pytest.mark.parametrize("variant", VARIANTS)
def test_kjv_against_its_reference(models: Path, variant: str) -> None:
    reference = json.loads((models / "kjv-moe" / "reference.json").read_text())
    oracle = np.load(models / "kjv-moe" / "reference.npz")
    with strata_core.load(kjv_path(models, variant), backend="reference") as model:
        for i, prompt in enumerate(reference["prompt_ids"]):
            error = np.abs(model.logits(prompt)[-1] - oracle[f"{variant}/logits{i}"]).max()
            assert error < 2e-4, f"prompt {i}"
        nll = model.perplexity(reference["passage_ids"], 512).nll
        assert abs(nll - reference["variants"][variant]["passage_nll"]) < 1e-5
        wanted = reference["variants"][variant]["greedy"][0]
        assert greedy(model, reference["prompt_ids"][0], len(wanted)) == wanted


@pytest.mark.shared
@pytest.mark.parametrize("family", FAMILIES)
def test_families_against_transformers(models: Path, family: str) -> None:
    given = np.load(models / "tiny" / family / "reference.npz")
    oracle = np.load(ORACLES / "tiny_transformers_float32.npz")
    with strata_core.load(models / "tiny" / family, backend="reference") as model:
        logits = model.logits(given["input_ids"])
        assert np.abs(logits - oracle[f"{family}/logits"]).max() < 2e-4
        assert greedy(model, given["greedy_prompt"], 16) == given["greedy"].tolist()


@pytest.mark.shared
@pytest.mark.parametrize("family", FAMILIES)
def test_families_against_their_given_logits(
    models: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given logits came from a model cast to bfloat16 and back, rope frequencies included."""

    def rounded(which: rope.Rope) -> tuple[np.ndarray, float]:
        exact, factor = frequencies(which)
        bits = exact.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64), factor

    frequencies = rope.frequencies
    monkeypatch.setattr(rope, "frequencies", rounded)
    assert interpreter.angles is rope.angles
    given = np.load(models / "tiny" / family / "reference.npz")
    with strata_core.load(models / "tiny" / family, backend="reference") as model:
        assert np.abs(model.logits(given["input_ids"]) - given["logits"]).max() < 2e-4
