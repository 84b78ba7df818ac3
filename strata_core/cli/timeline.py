"""`strata bench --timeline FILE`: where the time of a prompt goes, as a file and a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_core.checkpoint.own_files import refuse_own_file
from strata_core.cli.words import table
from strata_core.errors import StrataError, UsageError

if TYPE_CHECKING:
    from strata_core.api import Model

FORMAT, VERSION = "strata-timeline", 1

COLUMNS = ("layer", "experts", "MiB", "copy us", "compute us", "wait us", "held us")


def timeline_path(asked: str | None, prompt: int) -> Path | None:
    """The file that --timeline names; None without it. Raises UsageError."""
    if asked is None:
        return None
    if not asked:
        raise UsageError(
            "--timeline is empty", "it names the file to write", "name a file, or leave it out"
        )
    if not prompt:
        raise UsageError(
            "--timeline has no prompt to tell of",
            "-p 0 leaves the prompt out",
            "give -p a number of tokens",
        )
    path = Path(asked)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            f"--timeline {asked} cannot be written",
            "it is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}",
            "name a file in a folder that exists",
        )
    return path


def check_timeline(model: Model, path: Path) -> None:
    """Raise UsageError where a timeline of the loaded model cannot be had or go to `path`."""
    refuse_own_file(path, model.checkpoint, "the timeline", "--timeline")
    with model.timed_prompts():
        pass


def timed_prompt(
    model: Model, path: Path, ids: tuple[int, ...], generate: Callable[..., Any]
) -> list[Mapping[str, Any]]:
    """Run a prompt once more with timed events, and write what they tell to `path`.

    `check_timeline` came first. Raises UsageError where nothing is told of a prompt of this length.
    """
    with model.timed_prompts() as chunks:
        generate(ids, (), 0)
        found = list(chunks())
    if not found:
        raise UsageError(
            f"a prompt of {len(ids)} tokens has no timeline",
            "it is computed in windows, as decoding is, not in chunks",
            "give -p more tokens, and leave --exact-prompt out",
        )
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": str(model.checkpoint.path),
        "tokens": len(ids),
        "selections": [selection.as_json() for selection in model.selections],
        "plan": model.plan.as_json(),
        "chunks": found,
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise StrataError(
            f"the timeline cannot be written to {path}", str(error), "name another file"
        ) from error
    return found


def timeline_text(chunks: Sequence[Mapping[str, Any]]) -> str:
    """The longest chunk as a table, a line for each layer with experts."""
    chunk = max(chunks, key=lambda each: each["tokens"])
    rows = [
        _row("head" if each["layer"] is None else str(each["layer"]), each["copy"], each)
        for each in chunk["layers"]
    ]
    experts = sum(each["copy"]["experts"] for each in chunk["layers"])
    times = {name: {"us": chunk[f"{name}_us"]} for name in ("copy", "compute")}
    moved = {**times["copy"], "experts": experts, "bytes": chunk["bytes"]}
    rows.append(_row("all", moved, {**chunk, "compute": times["compute"]}))
    head = (
        f"a chunk of {chunk['tokens']} tokens from position {chunk['start']} on: "
        f"{chunk['us'] / 1e3:.2f} ms"
    )
    return f"{head}\n\n{table(COLUMNS, rows)}"


def _row(name: str, copy: Mapping[str, Any], each: Mapping[str, Any]) -> tuple[str, ...]:
    times = (copy["us"], each["compute"]["us"], each["wait_us"], each["held_us"])
    moved = str(copy["experts"]), f"{copy['bytes'] / 2**20:.1f}"
    return (name, *moved, *(f"{value:.0f}" for value in times))
