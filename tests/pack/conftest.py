"""Small models to pack, and what a pack of one looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import define, field

from strata_core.checkpoint.open import open_checkpoint
from strata_core.pack.write import Packed, write_pack
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf


@define
class Counting:
    """Progress that adds up: (label, bytes wanted) of each piece, and the bytes moved."""

    pieces: list[tuple[str, int]] = field(factory=list)
    moved: int = 0

    def start(self, label: str, nbytes: int) -> None:
        self.pieces.append((label, nbytes))

    def advance(self, nbytes: int) -> None:
        self.moved += nbytes

    def done(self) -> None:
        pass


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def pack() -> Callable[..., Packed]:
    """pack(MODEL, OUT): what `strata pack` does."""

    def make(model: Path, out: Path, progress: Counting | None = None) -> Packed:
        return write_pack(open_checkpoint(model), out, progress or Counting())

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model of two layers with 5 experts, its tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(
        path,
        hyper=tiny_hyper(experts=5, shared_ffn=256, family="qwen2_moe"),
        tokenizer=True,
        metadata={
            "tokenizer.chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        },
    )
    return path


@pytest.fixture
def packed(model: Path, tmp_path: Path, pack: Callable[..., Packed]) -> Path:
    """A pack of `model` for one test."""
    return pack(model, tmp_path / "packed").path
