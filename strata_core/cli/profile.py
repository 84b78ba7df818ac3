"""`strata profile`: which experts a model asks for, counted over a text."""

from __future__ import annotations

import time
from pathlib import Path

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.numbers import whole
from strata_core.cli.prompt import read_text
from strata_core.errors import UsageError
from strata_core.setting_table import LOADING

DEFAULT_CONTEXT = 512


@command(
    "profile",
    [
        model_argument(),
        click.Option(
            ["--text", "text_file"],
            required=True,
            metavar="FILE",
            help="The text, in UTF-8; - for stdin.",
        ),
        click.Option(
            ["-o", "--out", "out"],
            required=True,
            metavar="OUT",
            help="The file to write the profile to.",
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
def command_object(
    invocation: Invocation, model: str, text_file: str, out: str, context: int
) -> None:
    """Count how often MODEL asks for each of its experts over a text, for --expert-profile.

    The text is cut into windows of N tokens that do not overlap; tokens at the end that fill no
    window are left out, but a text shorter than N is one window. The more the text is like what
    the model will be used for, the better caches and tiers are filled by the profile.
    """
    from strata_core.cache.profile import write_profile

    if not out:
        raise UsageError("OUT is empty", "the profile needs a file", "give a path with -o")
    text = read_text(text_file, "--text")
    console = invocation.console
    with loaded(invocation, model) as running:
        running.profile()  # where nobody counts, the text need not be read first
        if running.tokenizer is None:
            raise UsageError(
                f"{model} has no tokenizer",
                "a text must be turned into token ids first",
                "use a model that comes with its tokenizer",
            )
        ids = running.tokenizer.encode(text)
        progress = console.progress()
        progress.begin("profile", 0, "windows")
        started = time.perf_counter()
        try:
            result = running.perplexity(ids, context, on_window=progress.reach)
        finally:
            progress.close()
        took = time.perf_counter() - started
        profile = running.profile()
        write_profile(profile, Path(out))
        asked = sum(1 for row in profile.counts.values() for n in row if n)
        there = sum(map(len, profile.counts.values()))
        tokens = result.windows * context if result.left_out else len(ids)
        console.line(
            f"{out}: {profile.picks} picks over {tokens} tokens; {asked} of {there} experts were "
            "asked for"
        )
        console.document(
            {
                "out": out,
                "model_hash": profile.model_hash,
                "tokens": tokens,
                "picks": profile.picks,
                "experts": there,
                "experts_asked_for": asked,
                **facts(running),
                "timings": {"load_s": running.timings["load_s"], "total_s": took},
            }
        )
        console.note(f"{tokens / took:.1f} tokens/s; {chosen(running.selections)}")
        for line in notes(running):
            console.note(line)
