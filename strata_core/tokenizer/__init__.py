"""Text to token ids and back: tokenizers, incremental text, chat templates."""

from __future__ import annotations

from strata_core.tokenizer.chat_template import NoChatTemplate
from strata_core.tokenizer.stream import TextStream
from strata_core.tokenizer.tokenizer import Tokenizer, open_tokenizer

__all__ = ["NoChatTemplate", "TextStream", "Tokenizer", "open_tokenizer"]
