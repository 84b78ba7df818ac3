"""`strata verify`: every check of a model that can be made, as a table, and the identity proof."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.logs import shown_log
from strata_core.cli.numbers import real
from strata_core.cli.words import size, table
from strata_core.errors import CheckpointError, UsageError
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from strata_core.checkpoint.open import Checkpoint
    from strata_core.cli.console import Console
    from strata_core.pack.verify import Damage, Outcome
    from strata_core.verify.identity import Outcome as Row
    from strata_core.verify.identity import Subject

SHOWN = 20
"""Lines of damage in the text; the document has all of it."""

_HASH = 16
"""Hexadecimal digits of a hash in the text."""


@command(
    "verify",
    [
        model_argument(),
        click.Option(["--hashes-only"], is_flag=True, help="Check the files alone; load nothing."),
        click.Option(
            ["--quick"],
            is_flag=True,
            help="Run every place with one cache size, and every cache size at one place, instead "
            "of all with all.",
        ),
        click.Option(
            ["--long"],
            is_flag=True,
            help="Run a prompt of 1,900 tokens as well, where the context is long enough.",
        ),
        click.Option(
            ["--time-limit"],
            type=real,
            metavar="SECONDS",
            help="Begin no further run after so many seconds; runs left out are named. Default: "
            "no limit.",
        ),
    ],
    LOADING,
)
def command_object(
    invocation: Invocation,
    model: str,
    hashes_only: bool,
    quick: bool,
    long: bool,
    time_limit: float | None,
) -> int:
    """Check MODEL's files, and prove that its tokens do not depend on where experts lie.

    First prints one row for each check of the files: every hash of a pack, every value of other
    forms. What is damaged is named with its file and place; then nothing is run. A GGUF file or a
    hub folder holds no hashes: there it can be checked that everything is in its place, can be
    read, and that every float and scale is a finite number.

    Then MODEL is run with short prompts in every way that fits this machine: each source, several
    sizes of a tier in memory, and where the backend has devices each way of page-locking and
    several sizes of the expert cache. Settings that are given hold for every run; only the others
    are varied. Each run's logits and tokens are compared with those of --backend cpu; prompts that
    the backend sums in an order of its own, with those of its first run. Prints one
    row for each. A row is idle where tokens are equal but what it is about never happened, such as
    an expert that goes over the link; it counts neither as equal nor as a failure. Leaves with exit
    code 1 where anything is damaged, differs or fails, and where no row is equal.
    """
    if time_limit is not None and time_limit <= 0:
        raise UsageError(
            f"--time-limit {time_limit:g} leaves no time",
            "runs take some",
            "give more, or leave it out",
        )
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.checkpoint.pack_format import MANIFEST

    path = model_path(model)
    began = time.perf_counter()
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        if not (path / MANIFEST).exists():
            raise
        _tell_unopened(invocation.console, model, path, error)
        return 1
    outcomes = _check_files(invocation.console, checkpoint)
    took = time.perf_counter() - began
    damaged = any(outcome.verdict == "damaged" for outcome in outcomes)
    identity = None
    if not hashes_only and not damaged:
        from strata_core.verify.identity import subject

        asked = subject(model, path, invocation.settings(), long=long)
        identity = _prove(invocation, asked, quick=quick, seconds=time_limit)
    fine = not damaged and (identity is None or identity["equal"])
    timings = {"total_s": time.perf_counter() - began, "files_s": took}
    known = (checkpoint.form, checkpoint.model_hash)
    invocation.console.document(_document(model, known, fine, outcomes, identity, timings))
    return 0 if fine else 1


def _document(
    model: str,
    known: tuple[str, str | None],
    fine: bool,
    outcomes: list[Outcome],
    identity: dict[str, Any] | None,
    timings: dict[str, float],
) -> dict[str, Any]:
    """The document; `known` are the model's form and its hash."""
    form, model_hash = known
    return {
        "model": model,
        "form": form,
        "model_hash": model_hash,
        "ok": fine,
        "checks": [outcome.as_json() for outcome in outcomes],
        "identity": identity,
        "timings": timings,
    }


def _tell_unopened(console: Console, model: str, path: Path, error: CheckpointError) -> None:
    """A pack that does not even open: one row, and nothing else can be checked."""
    from strata_core.checkpoint.packed import PACK
    from strata_core.pack.verify import Damage, Outcome

    outcome = Outcome(
        check="structure",
        verdict="damaged",
        note="the pack does not open, so nothing else is checked",
        damage=(Damage(error.what, str(path), 0, 0, error.why),),
    )
    console.text(_table([outcome]))
    for line in (*_damage([outcome]), "copy the pack here again, or make it anew with strata pack"):
        console.line(line)
    console.document(_document(model, (PACK, None), False, [outcome], None, {}))


def _check_files(console: Console, checkpoint: Checkpoint) -> list[Outcome]:
    """Check a model's files, print the table, and close them."""
    from strata_core.pack.verify import CHECKS, run_checks

    began = time.perf_counter()
    progress = console.progress()
    try:
        outcomes = list(run_checks(CHECKS, checkpoint, progress))
    finally:
        progress.close()
        checkpoint.close()
    took = time.perf_counter() - began
    console.text(_table(outcomes))
    for line in _damage(outcomes):
        console.line(line)
    nbytes = sum(outcome.nbytes for outcome in outcomes)
    console.note(f"{size(nbytes)} read in {took:.1f} s, {size(nbytes / took)}/s")
    return outcomes


def _prove(
    invocation: Invocation, asked: Subject, *, quick: bool, seconds: float | None
) -> dict[str, Any]:
    """Run every way, and print the rows as they come; what the document has of it."""
    from strata_core.verify.identity import REFERENCE, VERDICTS, prove
    from strata_core.verify.ways import ways

    console = invocation.console
    found = ways(asked.facts, devices=asked.devices, given=asked.settings.given(), quick=quick)
    console.line()
    widths = [max(len(way.place) for way in found), 5, 6, _HASH, 7]
    heading = ["place", "cache", "pinned", "first logits", "tokens", "experts by lane"]
    console.text(_line(heading, widths))
    progress = console.progress()

    def show(row: Row) -> None:
        progress.close()
        console.text(_line(_cells(row), widths))

    try:
        with shown_log(progress.tell, quiet=True):
            expected, rows = prove(asked, found, seconds=seconds, progress=progress, on_row=show)
    finally:
        progress.close()
    count = {v: sum(row.verdict == v for row in rows) for v in VERDICTS}
    ran = len(rows) - count["skipped"]
    text = f"{count['equal']} of {ran} ways on backend {asked.backend} equal backend {REFERENCE}"
    others = [f"; {count[v]} {v}" for v in VERDICTS if v != "equal" and count[v]]
    console.line(text + "".join(others))
    if not ran:
        console.line("nothing is proven: no way could be tried, for the reasons above.")
    for line in _own_order(asked.backend, rows):
        console.line(line)
    inexact = _inexact(asked.backend, rows)
    for line in inexact:
        console.line(line)
    first = next(iter(expected.answers.values()))
    return {
        "equal": count["equal"] + count["idle"] == ran and count["equal"] > 0,
        "backend": asked.backend,
        "reference": {
            "backend": REFERENCE,
            "first_logits_sha256": first.logits,
            "seconds": expected.seconds,
        },
        "prompts": [len(prompt.ids) for prompt in asked.prompts],
        "count": count,
        "inexact": " ".join(inexact) or None,
        "rows": [row.as_json() for row in rows],
    }


def _own_order(backend: str, rows: Sequence[Row]) -> list[str]:
    """What was compared where prompts have an order of the backend's own."""
    from strata_core.verify.identity import REFERENCE

    runs = [row.run for row in rows if row.run is not None and row.run.own_order]
    if not runs:
        return []
    names = ", ".join(sorted(frozenset.union(*(run.own_order for run in runs))))
    lines = [
        f"Backend {backend} sums these prompts in an order of its own: {names}. They are compared",
        f"with its first way that ran, not with backend {REFERENCE} (--exact-prompt does that);",
        "docs/arithmetic.md, section 11, says how near they are.",
    ]
    if len(runs) == 1:
        lines.append("One way ran alone, so that nothing is proven of them.")
    return lines


def _inexact(backend: str, rows: Sequence[Row]) -> list[str]:
    """What other logits mean where the backend does not claim to have the same ones."""
    from strata_core.verify.identity import REFERENCE

    found = [row.run for row in rows if row.run is not None]
    if all(run.exact for run in found) or all(row.verdict != "differs" for row in rows):
        return []
    lines = [
        f"backend {backend} is not exact: it adds in another order than backend {REFERENCE},",
        "so its logits are others by themselves. This is no sign of damage, in files or in memory.",
    ]
    if all(run.answers == found[0].answers for run in found):
        lines.append("All of its ways are equal to each other, wherever experts lie.")
    else:
        lines.append("Its ways are not all equal to each other either.")
    lines.append(
        f"Only --backend {REFERENCE} and devices that are exact can be proven to be equal."
    )
    return lines


def _cells(row: Row) -> list[str]:
    place = [row.way.place, row.way.cache]
    if row.run is None:
        return [*place, "", "", "skipped" if row.verdict == "skipped" else "FAILED", row.note]
    lanes = ", ".join(f"{lane} {count}" for lane, count in row.served.items())
    equal = {"equal": "equal", "idle": "idle"}.get(row.verdict, "DIFFER")
    note = f"; {row.note}" if row.note else ""
    return [*place, _pinned(row), row.logits[:_HASH], equal, lanes + note]


def _pinned(row: Row) -> str:
    """How much of host memory for experts is page-locked; "" where there is none."""
    actual = row.run.actual if row.run else None
    if actual is None or not actual.paths:
        return ""
    return f"{100 * actual.pinned // max(1, actual.host)} %"


def _line(cells: list[str], widths: list[int]) -> str:
    """One row of a table of which the others are not known yet."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, *cells[len(widths) :]]).rstrip() + "\n"


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


def _range(item: Damage) -> str:
    """The place within a file, where it is known."""
    return f", {item.nbytes} bytes at offset {item.offset}" if item.nbytes else ""


def _damage(outcomes: list[Outcome]) -> list[str]:
    lines = [
        f"damaged: {item.what}, {item.file}{_range(item)}: {item.why}"
        for outcome in outcomes
        for item in outcome.damage
    ]
    if len(lines) > SHOWN:
        rest = len(lines) - SHOWN
        lines[SHOWN:] = [f"... and {rest} more; --json names all"]
    return lines
