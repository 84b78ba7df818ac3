"""Tokenizer files that the library reads, or uses, with a failure of its own kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.testing.tiny import write_tiny_hub
from strata_core.tokenizer import open_tokenizer
from strata_core.tokenizer.library import guarded

WORDS = {"a": 0, "b": 1, "ab": 2}
BPE = {"type": "BPE", "vocab": WORDS, "merges": [], "unk_token": None}


def whole(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A tokenizer.json around a model."""
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model, **parts}


def template(*known: str) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
        "pair": [],
        "special_tokens": {name: {"id": name, "ids": [1], "tokens": [name]} for name in known},
    }


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


# Those marked with a star make the library's Rust code panic.
FILES = {
    "no unknown word": whole({"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"}),
    "no unknown piece": whole({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}),
    "unknown token unknown": whole({**BPE, "unk_token": "x"}),
    "unknown id out of range": whole({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 9}),
    "prefix longer than token*": whole(
        {**BPE, "continuing_subword_prefix": "##", "merges": ["a b"]}
    ),
    "empty character map*": whole(
        BPE, normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
    ),
    "template names nothing*": whole(BPE, post_processor=template()),
    "chunks of nothing*": whole(BPE, pre_tokenizer={"type": "FixedLength", "length": 0}),
    "endless expression*": whole(BPE, pre_tokenizer=split("(a*)*$")),
    "broken expression": whole(BPE, pre_tokenizer=split("((")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_hub(tmp_path)
    return tmp_path


def use_tokenizer(folder: Path) -> None:
    tokenizer = open_tokenizer(open_checkpoint(folder))
    assert tokenizer is not None
    tokenizer.encode("a" * 40 + "ü")


@pytest.mark.parametrize("case", FILES)
def test_it_is_an_error_of_the_checkpoint(case: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(FILES[case]), "utf-8")
    with pytest.raises(CheckpointError) as caught:
        use_tokenizer(folder)
    assert str(folder / "tokenizer.json") in caught.value.what
    assert caught.value.why
    assert "\n" not in caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_the_librarys_passes(error: Callable[[], BaseException]) -> None:
    with pytest.raises(type(error())), guarded("what", "remedy"):
        raise error()
