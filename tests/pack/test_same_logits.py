"""A pack computes what its original computes: logits bit for bit, from every source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.engine.messages import Finished
from strata_core.pack.write import Packed
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.tokenizer import open_tokenizer

VARIANTS = ["bf16", "Q8_0", "Q4_0", "Q4_K_M", "MXFP4"]
FAMILIES = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"]
TEXT = "And God said, Let there be light: and there was light. \u00e9\u65e5 <|endoftext|> 1234"


def logits(path: Path, ids: list[int], **options: str) -> np.ndarray:
    with strata_core.load(path, **options) as model:
        return model.logits(ids)


def check(source: Path, packed: Path, ids: list[int]) -> None:
    expected = logits(source, ids)
    for name in ("arena", "mmap"):
        found = logits(packed, ids, source=name, verify_reads="all" if name == "arena" else "off")
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), name


@pytest.mark.shared
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trained_model(
    variant: str, models: Path, tmp_path: Path, pack: Callable[..., Packed]
) -> None:
    folder = models / "kjv-moe"
    source = folder if variant == "bf16" else folder / f"kjv-{variant}.gguf"
    packed = pack(source, tmp_path / "out").path
    with strata_core.load(source) as before, strata_core.load(packed) as after:
        assert before.tokenizer is not None
        assert after.tokenizer is not None
        ids = before.tokenizer.encode(TEXT)
        assert after.tokenizer.encode(TEXT) == ids
        assert after.tokenizer.eos == before.tokenizer.eos
        one, other = (
            list(m.generate(TEXT, max_tokens=24, ignore_eos=True))[-1] for m in (before, after)
        )
        assert isinstance(one, Finished)
        assert isinstance(other, Finished)
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
    check(source, packed, ids)


@pytest.mark.shared
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(
    family: str, models: Path, tmp_path: Path, pack: Callable[..., Packed]
) -> None:
    source = models / "tiny" / family
    made = pack(source, tmp_path / "out")
    roles = {tensor.role for tensor in made.manifest.tensors}
    assert ("attn_q_bias" in roles, "shared_router" in roles) == (family == "qwen2_moe",) * 2
    check(source, made.path, [1, 2, 3, 5, 8, 13, 21, 34])


def test_the_demo(tmp_path: Path, pack: Callable[..., Packed]) -> None:
    from strata_core import demo

    packed = pack(demo.PATH, tmp_path / "out").path
    tokenizers = [open_tokenizer(open_checkpoint(p)) for p in (demo.PATH, packed)]
    before, after = (tokenizer.encode(TEXT) for tokenizer in tokenizers if tokenizer)
    assert before == after
    check(demo.PATH, packed, before)


@pytest.mark.parametrize("kind", ["Q5_1", "Q6_K", "BF16"])
def test_other_types(kind: str, tmp_path: Path, pack: Callable[..., Packed]) -> None:
    hyper = tiny_hyper(experts=3, layers=3, dense_layers=frozenset({1}))
    write_tiny_gguf(tmp_path / "m.gguf", hyper=hyper, expert_type=kind, dense_type="Q5_K")
    check(tmp_path / "m.gguf", pack(tmp_path / "m.gguf", tmp_path / "out").path, [7, 8, 9])
