"""`strata profile`: which experts a model asks for, counted over a text."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.prompt import read_text
from strata_core.cli.windows import run_text, text_options
from strata_core.errors import UsageError
from strata_core.setting_table import LOADING


@command(
    "profile",
    [
        model_argument(),
        *text_options(),
        click.Option(
            ["-o", "--out", "out"],
            required=True,
            metavar="OUT",
            help="The file to write the profile to.",
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
    from strata_core.cache.profile import refuse_unwritable, write_profile
    from strata_core.checkpoint.own_files import refuse_own_file

    if not out:
        raise UsageError("OUT is empty", "the profile needs a file", "give a path with -o")
    with suppress(OSError):
        if Path(out).samefile(text_file):
            raise UsageError(
                f"cannot write the profile to {out}", "it is the text itself", "name another file"
            )
    refuse_unwritable(Path(out))
    text = read_text(text_file, "--text")
    console = invocation.console
    with loaded(invocation, model) as running:
        refuse_own_file(Path(out), running.checkpoint, "the profile", "-o")
        running.profile()  # where nobody counts, the text need not be read first
        run = run_text(console, running, model, text, context, "profile")
        profile = running.profile()
        write_profile(profile, Path(out))
        asked = sum(1 for row in profile.counts.values() for n in row if n)
        there = sum(map(len, profile.counts.values()))
        tokens = run.tokens - run.result.left_out
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
                "timings": {"load_s": running.timings["load_s"], "total_s": run.seconds},
            }
        )
        console.note(f"{tokens / run.seconds:.1f} tokens/s; {chosen(running.selections)}")
        for line in notes(running):
            console.note(line)
