"""Text to token ids and back, for every form of checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.mapping import exists, read_json, read_small
from strata_core.errors import CheckpointError, UsageError
from strata_core.tokenizer.chat_template import ChatTemplate, NoChatTemplate
from strata_core.tokenizer.library import guarded
from strata_core.tokenizer.rebuild import Rebuilt, no_tokenizer_file, rebuild_tokenizer
from strata_core.tokenizer.stream import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from strata_core.checkpoint.open import Checkpoint


_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


@frozen(eq=False)
class Tokenizer:
    """The vocabulary of a model and what is done with it. Immutable; any thread may use it.

    `size` is the number of tokens it knows, `limit` that of the model's embedding rows; `bos` and
    `eos` are the ids that begin and that end a text. `eos` holds at least the checkpoint's
    `hyper.eos`: GGUF files name few of the tokens that end a text, the others are known by their
    names. `special` ids are control tokens: they are found in prompts, and not shown in text.
    """

    size: int
    limit: int
    bos: int | None
    eos: tuple[int, ...]
    special: frozenset[int]
    _backend: Backend
    _before: tuple[int, ...]
    _after: tuple[int, ...]
    _to_bytes: Callable[[str], bytes]
    _strip_first_space: bool
    _chat: ChatTemplate | None
    _source: str
    _bytes: dict[int, bytes] = field(factory=dict, init=False)
    """What tokens stand for, of those that were asked for so far; it never changes."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens the tokenizer knows; the model's embedding may have more rows."""
        return self.size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text; special tokens written in it are taken as such.

        `add_special` adds what the model wants around a prompt (a beginning-of-text token); leave
        it off for a rendered chat, whose template writes them itself. Raises UsageError for text
        that is not Unicode (lone surrogates, from invalid UTF-8), CheckpointError for an id
        beyond the model's embedding.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "the text is not valid Unicode",
                f"character {error.start} is half of a pair, as invalid UTF-8 input gives",
                "pass the text as UTF-8",
            ) from error
        with guarded(
            f"{self._source}: the tokenizer cannot take this text",
            "try another text, give token ids, or download the tokenizer again",
        ):
            ids = list(self._backend.encode(text, add_special_tokens=add_special).ids)
        if add_special:
            ids = [*self._before, *ids, *self._after]
        if ids and max(ids) >= self.limit:
            raise CheckpointError(
                f"{self._source}: the tokenizer gives token {max(ids)}",
                f"the model has embeddings for {self.limit} tokens",
                "tokenizer and model do not belong together; download them again",
            )
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence; invalid bytes give U+FFFD."""
        parts = [self.token_bytes(i) for i in ids if not (skip_special and i in self.special)]
        text = b"".join(parts).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strip_first_space else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for an id without a token."""
        found = self._bytes.get(token)
        if found is not None:
            return found
        text = self._backend.id_to_token(token) if token >= 0 else None
        return b"" if text is None else self._bytes.setdefault(token, self._to_bytes(text))

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A stream for the tokens that follow a prompt; special tokens give no text."""
        return TextStream(lambda t: b"" if t in self.special else self.token_bytes(t), stop)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._chat is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation of {"role", "content"} messages; encode it without special.

        Raises NoChatTemplate (a UsageError) where the model has none, CheckpointError where its
        template fails or exceeds what a template may do.
        """
        if self._chat is None:
            raise NoChatTemplate(
                "the model has no chat template",
                f"{self._source} does not say how a conversation is written",
                "use plain text generation",
            )
        return self._chat.render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where it has none (then prompts are given as ids).

    Raises CheckpointError naming file and field for one that is damaged or of an unknown kind.
    """
    if checkpoint.gguf is not None:
        return _from_gguf(checkpoint)
    return _from_folder(checkpoint)


def _from_gguf(checkpoint: Checkpoint) -> Tokenizer | None:
    metadata = checkpoint.gguf
    if metadata is None or (rebuilt := rebuild_tokenizer(metadata)) is None:
        return None
    source = str(metadata.file.path)
    template = metadata.text("tokenizer.chat_template", "")
    names = {"bos_token": rebuilt.bos, "eos_token": rebuilt.eos}
    chat = ChatTemplate(source, template, names) if template else None
    return _wrap(checkpoint, rebuilt.backend, source, chat, rebuilt)


def _from_folder(checkpoint: Checkpoint) -> Tokenizer | None:
    folder = checkpoint.path
    path = folder / "tokenizer.json"
    if not exists(path):
        for other in ("tokenizer.model", "vocab.json", "tiktoken.model"):
            if exists(folder / other):
                raise no_tokenizer_file(str(folder), other)
        return None
    from tokenizers import Tokenizer as Backend

    with guarded(
        f"{path} is not a readable tokenizer",
        "the file is damaged, or needs a newer version of the tokenizers library",
    ):
        backend = Backend.from_str(read_small(path).decode())
        # A prompt is one text of any length, whatever the file says about batches.
        backend.no_truncation()
        backend.no_padding()
    return _wrap(checkpoint, backend, str(path), _folder_template(checkpoint), None)


def _folder_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    folder = checkpoint.path
    settings = folder / "tokenizer_config.json"
    config = Config(settings, read_json(settings) if exists(settings) else {})
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        _, value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        names[name] = value if isinstance(value, str) else ""
    own = folder / "chat_template.jinja"
    if exists(own):
        try:
            return ChatTemplate(str(own), read_small(own, 1 << 24).decode(), names)
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{own} is not UTF-8", str(error), "download the file again"
            ) from error
    _, template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise config.bad("chat_template", f"a {type(template).__name__} where a text is expected")
    return ChatTemplate(str(settings), template, names)


def _wrap(
    checkpoint: Checkpoint,
    backend: Backend,
    source: str,
    chat: ChatTemplate | None,
    rebuilt: Rebuilt | None,
) -> Tokenizer:
    """The record; a tokenizer.json's own post-processor adds what goes around a prompt."""
    added = backend.get_added_tokens_decoder()
    to_bytes, strip = _byte_rule(backend, source)
    return Tokenizer(
        size=backend.get_vocab_size(with_added_tokens=True),
        limit=checkpoint.hyper.vocabulary,
        bos=checkpoint.hyper.bos,
        eos=tuple(dict.fromkeys((*checkpoint.hyper.eos, *(rebuilt.ends if rebuilt else ())))),
        special=frozenset(i for i, token in added.items() if token.special),
        backend=backend,
        before=rebuilt.before if rebuilt else (),
        after=rebuilt.after if rebuilt else (),
        to_bytes=to_bytes,
        strip_first_space=strip,
        chat=chat,
        source=source,
    )


# --- from a token's text to its bytes ----------------------------------------------------------


def _byte_rule(backend: Backend, source: str) -> tuple[Callable[[str], bytes], bool]:
    """How token texts become bytes, and whether a text's first space is an artefact.

    Two kinds of decoder are known: byte-level BPE, and SentencePiece's marks with byte tokens.
    """
    steps = _decoder_steps(backend)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(
            (step.get("type") == "Strip" and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return _sentencepiece_bytes, strips
    raise CheckpointError(
        f"{source}: the tokenizer's decoder is unknown",
        f"decoder is {', '.join(map(str, kinds)) or 'missing'}; "
        "ByteLevel and SentencePiece's Replace, ByteFallback, Fuse are known",
        "give prompts as token ids",
    )


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The decoder as a flat list of its parts' settings."""
    decoder = backend.decoder
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    if settings.get("type") == "Sequence":
        return list(settings.get("decoders", []))
    return [settings]


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes.

    Bytes that print stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()  # an added token, written as plain text


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()
