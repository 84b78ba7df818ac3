"""`strata bench --compare`: the bench and another program's, process by process in turn."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from strata_core import __version__
from strata_core.cli.command import Invocation
from strata_core.cli.words import table
from strata_core.errors import StrataError, UsageError

if TYPE_CHECKING:
    from strata_core.cli.compare.figures import Asked, Figures, Kind, Pair
    from strata_core.cli.compare.peers import Peer, Placed

FORMAT = "strata-comparison"
FORMAT_VERSION = 1


@frozen(kw_only=True)
class Comparison:
    """What `--compare` and its companions ask for.

    `peer` is NAME=PATH; `report` is a file for the document (None: none); `timeout` are the seconds
    that one process may take; `peer_flags` are more flags for the peer, the last to be read by it.
    """

    peer: str
    pairs: int
    timeout: float
    peer_flags: tuple[str, ...] = ()
    report: Path | None = None


def compare(
    invocation: Invocation, model: str, flags: Mapping[str, int], wanted: Comparison
) -> None:
    """Measure, print a line for each pair and the medians, write the documents.

    `flags` are prompt, decode, repeats and seed of the bench. No model is loaded in this process.
    Raises UsageError before anything is run, StrataError where a process fails; no document is
    written then.
    """
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.checkpoint.own_files import refuse_own_file
    from strata_core.cli.compare.figures import Asked
    from strata_core.cli.compare.reading import read_strata
    from strata_core.cli.compare.turns import run, take_turns

    peer, program = _peer(wanted.peer)
    path = _file(model_path(model), model)
    if wanted.report is not None:
        _writable(wanted.report, Path(program))
        refuse_own_file(wanted.report, open_checkpoint(path), "the report", "--report")
    named = invocation.settings().threads
    asked = Asked(
        flags["prompt"], flags["decode"], flags["repeats"], named or _cores(), named is not None
    )
    strata = [
        *(sys.executable, "-m", "strata_core", "bench", str(path), *asked.flags),
        *("--seed", str(flags["seed"]), "--json"),
        *_own_flags(invocation),
    ]
    kinds = list(asked.tokens)
    console = invocation.console
    commands = {"strata": shlex.join(strata)}

    def command(first: Figures) -> list[str]:
        made = peer.command(program, str(path), asked, _placed(path, first))
        made += wanted.peer_flags
        commands[peer.name] = shlex.join(made)
        return made

    def show(number: int, pair: Pair) -> None:
        if number == 1:
            for name, line in commands.items():
                console.note(f"{name}: {line}")
        console.note(f"pair {number} of {wanted.pairs}: {_cells(pair, kinds)}")

    pairs = take_turns(
        (strata, read_strata),
        (command, peer.read),
        asked,
        wanted.pairs,
        lambda line: run(line, wanted.timeout),
        show,
    )
    document = _document(path, asked, peer, commands, pairs)
    console.text(_text(peer, document, kinds))
    console.document(document)
    if wanted.report is not None:
        _write(wanted.report, document)


def _peer(given: str) -> tuple[Peer, str]:
    from strata_core.cli.compare.peers import PEERS

    name, sign, program = given.partition("=")
    if not sign or not program or name not in PEERS:
        raise UsageError(
            f"--compare {given} names no program to compare with",
            f"what is known: {', '.join(PEERS)}",
            f"give a name and the program's path, e.g. --compare {next(iter(PEERS))}=PATH",
        )
    return PEERS[name], program


def _writable(report: Path, program: Path) -> None:
    """Raises UsageError for a report that cannot be written, or not beside the peer's program."""
    why = f"there is no folder {report.parent}"
    cure = "make the folder first, or name a file in another one"
    if report.parent.is_dir():
        cure = "name a file of its own"
        why = f"{report} is a folder" if report.is_dir() else ""
        if report.exists() and program.exists() and report.samefile(program):
            why = "it is the program to compare with, which would be lost"
        at = report if report.exists() else report.parent
        if not why and not os.access(at, os.W_OK):
            why = f"{at} is closed to writing"
    if why:
        raise UsageError(f"--report {report} cannot be written", why, cure)


def _write(report: Path, document: Mapping[str, Any]) -> None:
    try:
        report.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", "utf-8")
    except OSError as error:
        raise StrataError(
            f"the report {report} cannot be written",
            error.strerror or str(error),
            "the figures are in what was printed; with --json all that the file would hold",
        ) from error


def _file(path: Path, model: str) -> Path:
    if not path.is_file():
        raise UsageError(
            f"{model} cannot be given to another program",
            "it is no single GGUF file",
            "compare with a GGUF file that both programs read",
        )
    return path


def _cores() -> int:
    """As many threads as the CPU backend would take."""
    from strata_core.kernels.cpu.backend import threads_of
    from strata_core.machine import read_machine

    return threads_of(read_machine())


def _own_flags(invocation: Invocation) -> list[str]:
    """The settings flags of this call, for the processes that it starts."""
    found = ["--config", invocation.config] if invocation.config else []
    for setting in invocation.table.settings:
        value = invocation.flags.get(setting.key)
        if setting.flag is None or value is None:
            continue
        found += [setting.flag] if setting.kind == "switch" else [setting.flag, str(value)]
    return found


def _placed(path: Path, figures: Figures) -> Placed:
    """How much of the model Strata had on its devices, by what it said after the first process."""
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.cli.compare.peers import Placed
    from strata_core.plan.sizes import SLOTS

    checkpoint = open_checkpoint(path)
    try:
        files = checkpoint.experts
        total = sum(layout.nbytes for layout in files.layouts.values()) * files.count
        layers = len(files.layouts)
    finally:
        checkpoint.close()
    tiers = figures.about["plan"]["memory"]
    devices = [tier for tier in tiers if tier["kind"].startswith("vram")]
    held = sum(i["actual"] for t in devices for i in t["items"] if i["name"] == SLOTS)
    return Placed(layers=layers, experts=held / max(1, total), device=bool(devices))


def _document(
    path: Path,
    asked: Asked,
    peer: Peer,
    commands: Mapping[str, str],
    pairs: Sequence[Pair],
) -> dict[str, Any]:
    """What was run, where, when, and every figure."""
    from strata_core.cli.compare.figures import summary
    from strata_core.machine import read_machine

    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": read_machine().to_json(),
        "model": {"name": path.name, "bytes": path.stat().st_size},
        "asked": {**asdict(asked), "pairs": len(pairs)},
        "peer": peer.name,
        "commands": dict(commands),
        "versions": {"strata": __version__, "python": platform.python_version()},
        "summary": summary(pairs, list(asked.tokens)),
        "pairs": [
            {
                "ratio": {kind: pair.ratio(kind) for kind in asked.tokens},
                "strata": pair.strata.as_json(),
                "peer": pair.peer.as_json(),
            }
            for pair in pairs
        ],
    }


def _cells(pair: Pair, kinds: Sequence[Kind]) -> str:
    """A pair's rates and their ratio, run by run."""
    return ", ".join(
        f"{kind} {pair.strata.tok_s(kind):.2f} / {pair.peer.tok_s(kind):.2f} "
        f"= {pair.ratio(kind):.3f}"
        for kind in kinds
    )


def _text(peer: Peer, document: Mapping[str, Any], kinds: Sequence[Kind]) -> str:
    """The table of medians, with the ratios' lowest and highest."""
    rows = []
    for kind in kinds:
        found = document["summary"][kind]
        ratio = found["ratio"]
        rows.append(
            (
                kind,
                str(document["asked"][kind]),
                f"{found['strata_tok_s']['median']:.2f}",
                f"{found['peer_tok_s']['median']:.2f}",
                f"{ratio['median']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            )
        )
    return table(["run", "tokens", "strata tok/s", f"{peer.name} tok/s", "ratio", "spread"], rows)


def parse_flags(text: str) -> tuple[str, ...]:
    """More flags for the peer, split as a shell splits them. Raises UsageError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--peer-args {text!r} cannot be split", str(error), "close every quotation mark"
        ) from None
