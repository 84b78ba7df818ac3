"""A text run through a model in windows, for the commands that measure over one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
from attrs import frozen

from strata_core.cli.numbers import whole
from strata_core.errors import UsageError

if TYPE_CHECKING:
    from strata_core.api import Model
    from strata_core.cli.console import Console
    from strata_core.engine.perplexity import Perplexity

DEFAULT_CONTEXT = 512


def text_options() -> list[click.Parameter]:
    """`--text FILE` and `--context N`."""
    return [
        click.Option(
            ["--text", "text_file"],
            required=True,
            metavar="FILE",
            help="The text, in UTF-8; - for stdin.",
        ),
        click.Option(
            ["--context"],
            type=whole(2),
            default=DEFAULT_CONTEXT,
            metavar="N",
            help=f"Tokens in a window. Default: {DEFAULT_CONTEXT}.",
        ),
    ]


@frozen
class Run:
    """What came of a text: the result, its tokens, the seconds that it took."""

    result: Perplexity
    tokens: int
    seconds: float


def run_text(console: Console, model: Model, name: str, text: str, context: int, label: str) -> Run:
    """Run a text in windows of `context` tokens, with progress. Raises StrataError.

    `name` is what the user called the model, `label` what is done.
    """
    if model.tokenizer is None:
        raise UsageError(
            f"{name} has no tokenizer",
            "a text must be turned into token ids first",
            "use a model that comes with its tokenizer",
        )
    ids = model.tokenizer.encode(text)
    progress = console.progress()
    progress.begin(label, 0, "windows")
    started = time.perf_counter()
    try:
        result = model.perplexity(ids, context, on_window=progress.reach)
    finally:
        progress.close()
    return Run(result, len(ids), time.perf_counter() - started)
