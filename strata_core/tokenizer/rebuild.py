"""A tokenizer rebuilt from GGUF metadata, for the `tokenizers` library.

The expressions that cut text into words before merging are facts of the models' published
tokenizers; GGUF files refer to them by a name (tokenizer.ggml.pre), as llama.cpp's llama-vocab.cpp
lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from strata_core.checkpoint.gguf_metadata import Metadata
from strata_core.checkpoint.shown import printable
from strata_core.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_P = "tokenizer.ggml."
MAX_TOKEN = 4096
"""Most characters of one token; real ones stay below 600."""

# Token types of GGUF (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Names that end a text or a turn in published vocabularies.
_ENDS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
        *("<end_of_turn>", "<EOT>", "</s>"),
    )
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_SLASH}"
)


@frozen
class PreTokenizer:
    """How text is cut into words: expressions applied one after the other to what is left.

    `nfc`: the published tokenizer composes characters first. `whole_words`: a word that is a token
    is taken without merging. `add_bos`: what holds where the file has no add_bos_token.
    """

    expressions: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_DIGITS_ALONE = (r"\p{N}", _GPT2)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
_PLAIN = PreTokenizer((_GPT2,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "jais": _PLAIN,
    "mellum": _PLAIN,
    "exaone4": _PLAIN,
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "qwen2": _QWEN,
    "megrez": _QWEN,
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    "llama3": PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "starcoder": PreTokenizer(_DIGITS_ALONE),
    "refact": PreTokenizer(_DIGITS_ALONE),
    "command-r": PreTokenizer(_DIGITS_ALONE),
    "smollm": PreTokenizer(_DIGITS_ALONE),
    "codeshell": PreTokenizer(_DIGITS_ALONE),
}


@frozen(eq=False)
class Rebuilt:
    """A tokenizer from metadata: the library's object, and which ids go around a prompt.

    `bos` and `eos` are the texts of those tokens, "" where the file names none. `ends` are control
    tokens that by their names end a text or a turn; files often name only one of them by key.
    """

    backend: Backend
    before: tuple[int, ...]
    after: tuple[int, ...]
    bos: str
    eos: str
    ends: tuple[int, ...]


def rebuild_tokenizer(metadata: Metadata) -> Rebuilt | None:
    """The tokenizer that a GGUF file describes, None where it says it has none.

    Raises CheckpointError naming the key for an unknown kind or damaged lists.
    """
    model = metadata.text(_P + "model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise metadata.bad(_P + "model", f"{model[:40]!r} is unknown; gpt2, llama, none are known")
    tokens = _tokens(metadata)
    kinds = _parallel(metadata, "token_type", len(tokens), NORMAL)
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens)
    else:
        backend, add_bos = _sentencepiece(metadata, tokens, kinds), True
    _add_special(backend, tokens, kinds)
    bos, eos = (_special(metadata, name, len(tokens)) for name in ("bos", "eos"))
    return Rebuilt(
        backend,
        _around(metadata, "bos", bos, add_bos),
        _around(metadata, "eos", eos, False),
        "" if bos is None else tokens[bos],
        "" if eos is None else tokens[eos],
        tuple(int(i) for i in np.flatnonzero(kinds == CONTROL) if tokens[i] in _ENDS),
    )


def _tokens(metadata: Metadata) -> list[str]:
    """The vocabulary in id order; empty entries get a name, as every token needs its own."""
    key = _P + "tokens"
    tokens = metadata.texts(key)
    if not tokens:
        raise metadata.bad(key, "the list is missing or empty")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise metadata.bad(key, f"token {printable(twice, 60)!r} stands in the list twice")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN:
        raise metadata.bad(key, f"a token has {longest} characters, at most {MAX_TOKEN} are read")
    return tokens


def _parallel(metadata: Metadata, name: str, count: int, fill: int) -> np.ndarray:
    """A list with one number a token; `fill` for each where the file has no such list."""
    values = metadata.numbers(_P + name)
    if not values.size:
        return np.full(count, fill)
    if values.size < count:
        raise metadata.bad(_P + name, f"{values.size} values for {count} tokens")
    return values[:count]


def _special(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"{_P}{name}_token_id"
    if key not in metadata:
        return None
    value = metadata.integer(key)
    if value in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= value < count:
        raise metadata.bad(key, f"{value} is outside the list of {count} tokens")
    return value


def _around(metadata: Metadata, name: str, token: int | None, default: bool) -> tuple[int, ...]:
    key = f"{_P}add_{name}_token"
    if not metadata.flag(key, default):
        return ()
    if token is None:
        if key in metadata:
            raise metadata.bad(key, f"true, but there is no {_P}{name}_token_id")
        return ()
    return (token,)


def _byte_level(metadata: Metadata, tokens: list[str]) -> tuple[Backend, bool]:
    """Byte-level BPE ("gpt2"): merges in order of rank, words cut as tokenizer.ggml.pre says."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.text(_P + "pre", "default")
    rules = PRE_TOKENIZERS.get(name)
    if rules is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise metadata.bad(_P + "pre", f"{printable(name, 40)!r} is unknown; known are {known}")
    merges = []
    for index, line in enumerate(metadata.texts(_P + "merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise metadata.bad(_P + "merges", f"merge {index} is {printable(line, 60)!r}")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=rules.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise metadata.bad(_P + "merges", " ".join(str(error).split())[:200]) from error
    backend = Tokenizer(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in rules.expressions]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, rules.add_bos


def _sentencepiece(metadata: Metadata, tokens: list[str], kinds: np.ndarray) -> Backend:
    """SentencePiece BPE ("llama"): two neighbours merge where the joined token's score is best."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _parallel(metadata, "scores", len(tokens), 0)
    if not np.isfinite(scores).all():
        raise metadata.bad(_P + "scores", "a score is not a finite number")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = _special(metadata, "unknown", len(tokens))
    try:
        model = models.BPE(
            vocabulary,
            _merges_by_score(tokens, kinds, scores, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # the library raises plain Exception
        raise metadata.bad(_P + "tokens", " ".join(str(error).split())[:200]) from error
    backend = Tokenizer(model)
    prefix = metadata.flag(_P + "add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    return backend


def _merges_by_score(
    tokens: list[str], kinds: np.ndarray, scores: np.ndarray, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first, then by the parts' ids."""
    found: list[tuple[float, int, int, int]] = []
    for index, token in enumerate(tokens):
        if kinds[index] not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[index]), index, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _add_special(backend: Backend, tokens: list[str], kinds: np.ndarray) -> None:
    """Tell the library which tokens are found in text before anything is cut or merged."""
    from tokenizers import AddedToken

    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        chosen = [tokens[i] for i in np.flatnonzero(kinds == kind)]
        add([AddedToken(t, normalized=False, special=kind == CONTROL) for t in chosen])


def no_tokenizer_file(folder: str, found: str) -> CheckpointError:
    """The error for a hub folder whose tokenizer is in a form that is not read."""
    return CheckpointError(
        f"{folder}: the tokenizer is stored as {found} only",
        "Strata reads tokenizer.json",
        "save the tokenizer again with a current version of transformers",
    )
