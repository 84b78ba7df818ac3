"""`strata verify`: every check of a model that can be made, as a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.words import size, table

if TYPE_CHECKING:
    from strata_core.pack.verify import Outcome

SHOWN = 20
"""Lines of damage in the text; the document has all of it."""


@command("verify", [model_argument()])
def command_object(invocation: Invocation, model: str) -> int:
    """Check MODEL's files: every hash of a pack, every value of other forms.

    Prints one row for each check. What is damaged is named with its file and place; then the exit
    code is 1. A GGUF file or a hub folder holds no hashes: there it can be checked that everything
    is in its place, can be read, and has no scale that stands for no number.
    """
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.pack.verify import CHECKS, run_checks

    console = invocation.console
    checkpoint = open_checkpoint(model_path(model))
    began = time.perf_counter()
    progress = console.progress()
    try:
        outcomes = list(run_checks(CHECKS, checkpoint, progress))
    finally:
        progress.close()
    took = time.perf_counter() - began
    damaged = any(outcome.verdict == "damaged" for outcome in outcomes)
    console.document(
        {
            "model": model,
            "form": checkpoint.form,
            "model_hash": checkpoint.model_hash,
            "ok": not damaged,
            "checks": [outcome.as_json() for outcome in outcomes],
            "timings": {"total_s": took},
        }
    )
    console.text(_table(outcomes))
    for line in _damage(outcomes):
        console.line(line)
    nbytes = sum(outcome.nbytes for outcome in outcomes)
    console.note(f"{size(nbytes)} read in {took:.1f} s, {size(nbytes / took)}/s")
    return 1 if damaged else 0


def _table(outcomes: list[Outcome]) -> str:
    rows = [
        (
            outcome.check,
            outcome.verdict,
            str(outcome.items or ""),
            size(outcome.nbytes) if outcome.nbytes else "",
            outcome.note,
        )
        for outcome in outcomes
    ]
    return table(["check", "verdict", "items", "bytes", ""], rows)


def _damage(outcomes: list[Outcome]) -> list[str]:
    lines = [
        f"damaged: {item.what}, {item.file}, {item.nbytes} bytes at offset {item.offset}: "
        f"{item.why}"
        for outcome in outcomes
        for item in outcome.damage
    ]
    if len(lines) > SHOWN:
        rest = len(lines) - SHOWN
        lines[SHOWN:] = [f"... and {rest} more; --json names all"]
    return lines
