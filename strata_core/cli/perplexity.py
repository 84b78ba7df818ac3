"""`strata perplexity`: how well a model predicts a text."""

from __future__ import annotations

import time

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.numbers import whole
from strata_core.cli.prompt import read_text
from strata_core.errors import UsageError
from strata_core.setting_table import LOADING

DEFAULT_CONTEXT = 512


@command(
    "perplexity",
    [
        model_argument(),
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
    ],
    LOADING,
)
def command_object(invocation: Invocation, model: str, text_file: str, context: int) -> None:
    """Measure how well MODEL predicts a text.

    The text is cut into windows of N tokens that do not overlap. The result is the mean negative
    log-likelihood of the tokens 2 to N of each window, and its exponential, the perplexity. Tokens
    at the end that fill no window are left out; a text shorter than N is one window.
    """
    text = read_text(text_file, "--text")
    console = invocation.console
    with loaded(invocation, model) as running:
        if running.tokenizer is None:
            raise UsageError(
                f"{model} has no tokenizer",
                "a text must be turned into token ids first",
                "use a model that comes with its tokenizer",
            )
        ids = running.tokenizer.encode(text)
        progress = console.progress()
        progress.begin("perplexity", 0, "windows")
        started = time.perf_counter()
        try:
            result = running.perplexity(ids, context, on_window=progress.reach)
        finally:
            progress.close()
        took = time.perf_counter() - started
        console.line(
            f"perplexity {result.perplexity:.4f}, mean negative log-likelihood {result.nll:.6f} "
            f"over {result.tokens} tokens in {result.windows} windows of {context}"
            + (f"; {result.left_out} tokens at the end left out" if result.left_out else "")
        )
        console.document(
            {
                "nll": result.nll,
                "perplexity": result.perplexity,
                "tokens": result.tokens,
                "windows": result.windows,
                "left_out": result.left_out,
                "context": context,
                **facts(running),
                "timings": {"load_s": running.timings["load_s"], "total_s": took},
            }
        )
        console.note(f"{len(ids) / took:.1f} tokens/s; {chosen(running.selections)}")
        for line in notes(running):
            console.note(line)
