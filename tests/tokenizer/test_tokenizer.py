"""Tokenizers from both forms, against the reference ids and the tokenizers library."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, UsageError
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub
from strata_core.tokenizer import Tokenizer, open_tokenizer
from strata_core.tokenizer.rebuild import PRE_TOKENIZERS

G = "tokenizer.ggml."
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
WORDS = st.lists(
    st.sampled_from(
        ["And", " the", " LORD", "'s", "  ", "\n", "\t", "1234", " 7", "é", "日本", "😀", "--",
         "?!", "<|endoftext|>", " can't", "\r\n", "\u00a0", "e\u0301", "x" * 9]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def pair(models: Path) -> tuple[Tokenizer, Tokenizer, Any]:
    """The kjv model's tokenizer from tokenizer.json, from GGUF, and the library's own."""
    folder = models / "kjv-moe"
    hub = open_tokenizer(open_checkpoint(folder))
    file = open_tokenizer(open_checkpoint(folder / "kjv-Q4_0.gguf"))
    assert hub is not None
    assert file is not None
    return hub, file, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.shared
def test_reference_ids(models: Path, pair: tuple[Tokenizer, Tokenizer, Any]) -> None:
    reference = json.loads((models / "kjv-moe" / "reference.json").read_text())
    for tokenizer in pair[:2]:
        for prompt, ids in zip(reference["prompts"], reference["prompt_ids"], strict=True):
            assert tokenizer.encode(prompt) == ids
            assert tokenizer.decode(ids) == prompt
        passage = tokenizer.decode(reference["passage_ids"])
        assert tokenizer.encode(passage) == reference["passage_ids"]
        assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (4096, 0, (0,))
        assert tokenizer.special == {0}


@pytest.mark.shared
@given(text=st.one_of(TEXT, WORDS))
@settings(max_examples=300, deadline=None)
def test_both_forms_give_the_librarys_ids(
    pair: tuple[Tokenizer, Tokenizer, Any], text: str
) -> None:
    hub, file, library = pair
    ids = library.encode(text).ids
    assert hub.encode(text) == ids
    assert file.encode(text) == ids
    assert file.decode(ids) == library.decode(ids)
    assert file.decode(ids, skip_special=False) == text


@pytest.mark.shared
@given(ids=st.lists(st.integers(0, 4095), max_size=40))
@settings(max_examples=200, deadline=None)
def test_decoding_any_ids_is_the_librarys(
    pair: tuple[Tokenizer, Tokenizer, Any], ids: list[int]
) -> None:
    hub, file, library = pair
    for skip in (True, False):
        expected = library.decode(ids, skip_special_tokens=skip)
        assert hub.decode(ids, skip_special=skip) == expected
        assert file.decode(ids, skip_special=skip) == expected


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Tokenizer | None]:
    def make(**metadata: Any) -> Tokenizer | None:
        path = tmp_path / "m.gguf"
        write_tiny_gguf(
            path, tokenizer=True, metadata={G + key: value for key, value in metadata.items()}
        )
        return open_tokenizer(open_checkpoint(path))

    return make


def opened(tokenizer: Tokenizer | None) -> Tokenizer:
    assert tokenizer is not None
    return tokenizer


def test_models_without_a_tokenizer(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    assert open_tokenizer(open_checkpoint(tmp_path / "m.gguf")) is None
    write_tiny_hub(tmp_path / "hub")
    assert open_tokenizer(open_checkpoint(tmp_path / "hub")) is None
    (tmp_path / "hub" / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model only"):
        open_tokenizer(open_checkpoint(tmp_path / "hub"))


def test_bytes_and_special_tokens(made: Callable[..., Tokenizer | None]) -> None:
    tokenizer = opened(made())
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]
    assert tokenizer.decode([97, 256, 98]) == "ab"
    assert tokenizer.decode([97, 256, 98], skip_special=False) == "a<|endoftext|>b"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    for _ in range(2):  # what was asked before is remembered, and stays what it was
        assert tokenizer.token_bytes(5000) == tokenizer.token_bytes(-1) == b""
        assert tokenizer.token_bytes(0xC3) == b"\xc3"
        assert tokenizer.token_bytes(256) == b"<|endoftext|>"
        shown = tokenizer.stream()
        assert [shown.push(t) for t in (97, 256, 0xC3, 0xA9, 5000)] == ["a", "", "", "é", ""]
    assert set(tokenizer._bytes) <= set(range(tokenizer.size)), "ids without a token are not kept"
    assert tokenizer.encode("") == []


def test_what_goes_around_a_prompt(made: Callable[..., Tokenizer | None]) -> None:
    assert opened(made()).encode("a") == [97]
    both = opened(made(add_bos_token=True, add_eos_token=True))
    assert both.encode("a") == [256, 97, 256]
    assert both.encode("a", add_special=False) == [97]
    assert opened(made(pre="llama-bpe", add_bos_token=None)).encode("a") == [256, 97]
    assert opened(made(pre="llama-bpe")).encode("a") == [97]
    with pytest.raises(CheckpointError, match="add_bos_token"):
        made(add_bos_token=True, bos_token_id=None)


def test_user_defined_tokens_are_found_and_shown(made: Callable[..., Tokenizer | None]) -> None:
    kinds = [1] * 256 + [3, 4, 4] + [5] * 61
    tokenizer = opened(made(token_type=kinds))
    assert tokenizer.encode("x[unused258]y") == [120, 258, 121]
    assert tokenizer.decode([258]) == "[unused258]"
    assert 258 not in tokenizer.special
    assert tokenizer.encode("[unused300]") == list(b"[unused300]")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=WORDS)
@settings(max_examples=12, deadline=None)
def test_every_pre_tokenizer_keeps_the_text(
    tmp_path_factory: pytest.TempPathFactory, pre: str, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"pre-{pre}.gguf"
    if not path.exists():
        write_tiny_gguf(path, tokenizer=True, metadata={G + "pre": pre})
    tokenizer = opened(open_tokenizer(open_checkpoint(path)))
    ids = tokenizer.encode(text, add_special=False)
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
    # Special tokens are cut out before anything is composed.
    if "<|endoftext|>" not in text:
        assert tokenizer.decode(ids, skip_special=False) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm 1234 ok\n\n x", ["I", "'m", " 1234", " ok", "\n\n", " x"]),
        ("qwen2", "I'M 12 ok\n\n x!\n", ["I", "'M", " ", "1", "2", " ok", "\n\n", " x", "!\n"]),
        ("llama-bpe", "12345 a\tb", ["123", "45", " a", "\tb"]),
        ("starcoder", "a12 b", ["a", "1", "2", " b"]),
        ("default", "a+b 12345", ["a", "+", "b", " 12345"[:1], "123", "45"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("olmo", "can't  stop", ["can", "'t", " ", " stop"]),
    ],
)
def test_words(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    """Where text is cut before merging, seen through the library's own pre-tokenizer."""
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, tokenizer=True, metadata={G + "pre": pre})
    backend = opened(open_tokenizer(open_checkpoint(path)))._backend
    spans = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in spans] == words


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model"),
        ({"pre": "nobody-knows"}, "tokenizer.ggml.pre"),
        ({"pre": 3}, "tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b" * 5000]}, "tokenizer.ggml.tokens"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"merges": ["a b"]}, "tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"merges": ["x y", "zzz q"]}, "tokenizer.ggml.merges"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token"),
    ],
)
def test_damaged_metadata(
    made: Callable[..., Tokenizer | None], metadata: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        made(**metadata)
    assert field in caught.value.what
    assert "m.gguf" in caught.value.what


def test_text_that_is_not_unicode(made: Callable[..., Tokenizer | None]) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        opened(made()).encode("a\udcff")


@pytest.mark.shared
def test_ids_beyond_the_embedding(tmp_path: Path, models: Path) -> None:
    """A tokenizer that belongs to a larger model is named as such."""
    write_tiny_hub(tmp_path)
    shutil.copy(models / "kjv-moe" / "tokenizer.json", tmp_path)
    tokenizer = opened(open_tokenizer(open_checkpoint(tmp_path)))
    assert tokenizer.encode("a") == [65]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer gives token"):
        tokenizer.encode("In the beginning God created")


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    write_tiny_hub(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_tokenizer(open_checkpoint(tmp_path))


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decoder is unknown") as caught:
        open_tokenizer(open_checkpoint(tmp_path))
    assert "WordPiece" in caught.value.why


# --- SentencePiece ("llama") -------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
LETTERS = ["▁", "a", "b", "c", "t", "h", "e"]
LONGER = ["▁t", "th", "he", "▁th", "the", "▁the", "ab", "abc", "bc", "▁a", "ca", "cat"]


def spm_metadata() -> dict[str, Any]:
    tokens = [*PIECES, *LETTERS, *LONGER]
    scores = [0.0] * len(PIECES) + [-50.0 - i for i in range(len(LETTERS))]
    scores += [-float(i) for i in range(len(LONGER))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(LETTERS) + len(LONGER))
    return {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": None,
    }


def spm_oracle(text: str) -> list[int]:
    """SentencePiece's rule read aloud: join the two neighbours that make the best-scored token."""
    data = spm_metadata()
    scores = dict(zip(data["tokens"], data["scores"], strict=True))
    index = {token: i for i, token in enumerate(data["tokens"])}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in index]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [index[part]] if part in index else [3 + byte for byte in part.encode()]
    return ids


@given(text=st.text(st.sampled_from([*"abcthe  ", "é", "日", "\n"]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_rule(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "spm.gguf"
    if not path.exists():
        write_tiny_gguf(
            path, tokenizer=True, metadata={G + k: v for k, v in spm_metadata().items()}
        )
    tokenizer = opened(open_tokenizer(open_checkpoint(path)))
    ids = tokenizer.encode(text)
    assert ids == [1, *spm_oracle(text)]
    assert tokenizer.decode(ids) == text
    # What follows a prompt keeps its first space.
    stream = tokenizer.stream()
    shown = "".join([stream.push(i) for i in ids[1:]] + [stream.flush()])
    assert shown == (" " + text if text else "")


def test_the_tiny_tokenizer_is_described_by_the_sizes() -> None:
    assert tiny_hyper().bos == 256


def test_tokens_known_to_end_a_text_by_name(made: Callable[..., Tokenizer | None]) -> None:
    tokens = [*(chr(0x4E00 + i) for i in range(256)), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    kinds = [1] * 256 + [3, 3, 3]
    changes = {"tokens": tokens, "token_type": kinds, "eos_token_id": 257, "bos_token_id": None}
    assert opened(made(**changes)).eos == (257, 258)
    kinds[258] = 1
    assert opened(made(**changes)).eos == (257,)
