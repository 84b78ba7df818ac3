"""Set `strata bench` beside llama-bench: the same file, turn by turn, and the ratio of each pair.

    python tests/bench/side_by_side.py MODEL.gguf --peer PATH/TO/llama-bench --json OUT.json

A pair is one process of `strata bench` and then one of llama-bench, each alone on the machine with
the same number of threads, prompt length, decode length and repeats; pairs follow each other as
A B A B, so that a machine that slows down slows both. A process's figure is the median of its
repeats, a pair's ratio is Strata's figure over the other's, and what counts is the median of the
ratios with the lowest and the highest. docs/benchmarks.md says more.

Needs Python's standard library alone. Exit codes: 0 measured, 1 a process failed or answered
something else than figures, 2 bad use. Nothing is written to OUT unless every pair was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

FORMAT = "strata-side-by-side"
FORMAT_VERSION = 1
KINDS = ("prompt", "decode")
ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A process failed, or what it printed is not what was asked for."""


# --- what was measured -------------------------------------------------------------------------


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of at least one number."""
    return {"median": median(numbers), "low": min(numbers), "high": max(numbers)}


@dataclass(frozen=True)
class Figures:
    """Tokens a second of each repeat of one process, by kind, and what it said about itself."""

    samples: Mapping[str, tuple[float, ...]]
    about: Mapping[str, Any]

    def tok_s(self, kind: str) -> float:
        """The process's figure: the median of its repeats."""
        return median(self.samples[kind])


@dataclass(frozen=True)
class Pair:
    """One process of each program, run one after the other."""

    strata: Figures
    peer: Figures

    def ratio(self, kind: str) -> float:
        """Strata's figure over the peer's: above 1 Strata is the faster one."""
        return self.strata.tok_s(kind) / self.peer.tok_s(kind)


@dataclass(frozen=True)
class Asked:
    """What every process is asked to measure; 0 tokens leave a kind out."""

    prompt: int
    decode: int
    repeats: int
    threads: int

    @property
    def tokens(self) -> dict[str, int]:
        """The kinds to measure, with their tokens."""
        both = zip(KINDS, (self.prompt, self.decode), strict=True)
        return {kind: count for kind, count in both if count}

    @property
    def flags(self) -> list[str]:
        """The flags that both programs have alike."""
        return ["-p", str(self.prompt), "-n", str(self.decode), "-r", str(self.repeats)]


def summary(pairs: Sequence[Pair], kinds: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """For each kind the spread over pairs of both programs' figures and of their ratio."""
    return {
        kind: {
            "strata_tok_s": spread([pair.strata.tok_s(kind) for pair in pairs]),
            "peer_tok_s": spread([pair.peer.tok_s(kind) for pair in pairs]),
            "ratio": spread([pair.ratio(kind) for pair in pairs]),
        }
        for kind in kinds
    }


# --- the two programs --------------------------------------------------------------------------


def strata_command(program: Sequence[str], model: str, asked: Asked, more: str) -> list[str]:
    """The command that makes `strata bench` measure what is asked."""
    own = ["--threads", str(asked.threads), "--json", *shlex.split(more)]
    return [*program, "bench", model, *asked.flags, *own]


def peer_command(program: str, model: str, asked: Asked, more: str) -> list[str]:
    """The command that makes llama-bench measure what is asked."""
    own = ["-t", str(asked.threads), "-o", "json", *shlex.split(more)]
    return [program, "-m", model, *asked.flags, *own]


def read_strata(text: str, asked: Asked) -> Figures:
    """The figures in a document of `strata bench --json`. Raises Failed."""
    document = _json(text, dict)
    samples = {}
    for kind, tokens in asked.tokens.items():
        rows = _member(_member(document, "samples", dict), kind, list)
        _check(f"tokens of a {kind} run", {_member(row, "tokens", int) for row in rows}, tokens)
        samples[kind] = _rates([_member(row, "tok_s", float) for row in rows], kind, asked)
    _check("threads", {_member(document, "machine", dict).get("threads")}, asked.threads)
    chosen = _member(document, "selections", list)
    about = {
        "machine": document["machine"],
        "selections": {item["role"]: item["name"] for item in chosen},
        "degradations": _member(document, "degradations", list),
        "kv": document.get("kv"),
        "seed": document.get("seed"),
        "load_s": document.get("timings", {}).get("load_s"),
    }
    return Figures(samples, about)


def read_peer(text: str, asked: Asked) -> Figures:
    """The figures in what `llama-bench -o json` prints. Raises Failed."""
    rows = [row for row in _json(text, list) if isinstance(row, dict)]
    samples = {}
    for kind, tokens in asked.tokens.items():
        lengths = (tokens, 0) if kind == "prompt" else (0, tokens)
        found = [row for row in rows if (row.get("n_prompt"), row.get("n_gen")) == lengths]
        _check(f"{kind} tests of {tokens} tokens", {len(found)}, 1)
        _check("threads", {_member(found[0], "n_threads", int)}, asked.threads)
        samples[kind] = _rates(_member(found[0], "samples_ts", list), kind, asked)
    _check("tests", {len(rows)}, len(samples))
    names = (
        *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type"),
        *("n_batch", "n_ubatch", "n_gpu_layers", "type_k", "type_v", "flash_attn"),
    )
    return Figures(samples, {name: rows[0][name] for name in names if name in rows[0]})


def _json(text: str, form: type) -> Any:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, form):
        raise Failed(f"no figures in what it printed: {text.strip()[:200] or 'nothing'}")
    return document


def _member(body: Any, name: str, form: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    allowed = (int, float) if form is float else form
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise Failed(f"{name!r} is missing from the figures, or of another form than known")
    return value


def _rates(values: Sequence[Any], kind: str, asked: Asked) -> tuple[float, ...]:
    _check(f"{kind} repeats", {len(values)}, asked.repeats)
    if not all(isinstance(v, int | float) and 0 < v < float("inf") for v in values):
        raise Failed(f"the {kind} figures {list(values)} are not all speeds")
    return tuple(float(v) for v in values)


def _check(what: str, found: set[Any], wanted: int) -> None:
    if found != {wanted}:
        raise Failed(f"{what}: {wanted} asked for, found {', '.join(map(str, found)) or 'none'}")


# --- running them ------------------------------------------------------------------------------


def run(command: Sequence[str], timeout: float, fine: Sequence[int] = (0,)) -> str:
    """What a command prints that ends with a `fine` exit code. Raises Failed.

    `-m` finds this checkout's package, whatever else is installed.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"it ran for more than {timeout:g} s (--timeout)") from None
    except OSError as error:
        raise Failed(f"it cannot be run: {error.strerror or error}") from None
    if done.returncode not in fine:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise Failed(f"it left with exit code {done.returncode}: {said or 'without a word'}")
    return done.stdout


def measure(
    commands: Mapping[str, Sequence[str]],
    asked: Asked,
    pairs: int,
    runner: Callable[[Sequence[str]], str],
    on_pair: Callable[[int, Pair], None],
) -> list[Pair]:
    """Run the pairs, A B A B; `on_pair(number, pair)` after each. Raises Failed."""
    readers = {"strata": read_strata, "peer": read_peer}
    measured = []
    for number in range(1, pairs + 1):
        figures = {}
        for name, read in readers.items():
            try:
                figures[name] = read(runner(commands[name]), asked)
            except Failed as error:
                command = shlex.join(commands[name])
                raise Failed(f"pair {number}: {command}\n{error}") from None
        measured.append(Pair(**figures))
        on_pair(number, measured[-1])
    return measured


# --- what is shown and written -----------------------------------------------------------------


def heading(kinds: Sequence[str]) -> str:
    """The table's first line."""
    cells = [f"{kind} {name}" for kind in kinds for name in ("strata", "peer", "ratio")]
    return f"{'pair':<8}" + "".join(f"{cell:>16}" for cell in cells)


def line(label: object, numbers: Sequence[float]) -> str:
    """A line of the table: for each kind tokens a second of both programs, and the ratio."""
    cells = [f"{n:>16.3f}" if i % 3 == 2 else f"{n:>16.2f}" for i, n in enumerate(numbers)]
    return f"{label:<8}" + "".join(cells)


def pair_numbers(pair: Pair, kinds: Sequence[str]) -> list[float]:
    """A pair's numbers for `line`."""
    return [
        number
        for kind in kinds
        for number in (pair.strata.tok_s(kind), pair.peer.tok_s(kind), pair.ratio(kind))
    ]


def summary_lines(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The lines of medians, lowest and highest over the pairs, each column for itself."""
    columns = [
        kind[name] for kind in found.values() for name in ("strata_tok_s", "peer_tok_s", "ratio")
    ]
    names = ("median", "low", "high")
    return "\n".join(line(name, [column[name] for column in columns]) for name in names)


def report(
    model: Path,
    machine: Mapping[str, Any],
    asked: Asked,
    commands: Mapping[str, Sequence[str]],
    strata_version: str,
    pairs: Sequence[Pair],
) -> dict[str, Any]:
    """The document for `--json`: what was run, where, when, and every figure."""
    first = pairs[0].peer.about
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "model": {"name": model.name, "bytes": model.stat().st_size},
        "asked": {**asdict(asked), "pairs": len(pairs)},
        "commands": {name: shlex.join(command) for name, command in commands.items()},
        "versions": {
            "strata": strata_version,
            "peer": f"{first.get('build_commit', '')} ({first.get('build_number', '')})",
            "python": platform.python_version(),
        },
        "summary": summary(pairs, list(asked.tokens)),
        "pairs": [
            {
                "ratio": {kind: pair.ratio(kind) for kind in asked.tokens},
                "strata": asdict(pair.strata),
                "peer": asdict(pair.peer),
            }
            for pair in pairs
        ],
    }


def checkout() -> str:
    """The commit of this checkout, as " (COMMIT)", with a plus where files differ from it."""
    try:
        commit = run(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], 10).strip()
        changed = run(["git", "-C", str(ROOT), "status", "--porcelain"], 10).strip()
    except Failed:
        return ""
    return f" ({commit}{'+' if changed else ''})"


# --- the machine -------------------------------------------------------------------------------


def read_machine(text: str) -> dict[str, Any]:
    """Processor, physical cores and system in a document of `strata doctor --json`."""
    facts = _member(_member(_json(text, dict), "machine", dict), "facts", dict)
    cores = _member(facts, "physical_cores", int)
    granted = facts.get("cpu_quota") or cores
    return {
        "cpu_model": _member(facts, "cpu_model", str),
        "cores": max(1, min(cores, int(granted))),
        "system": f"{facts.get('os')} {facts.get('release')} {facts.get('architecture')}",
    }


# --- the command line --------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The script's own command line."""

    def count(low: int) -> Callable[[str], int]:
        def read(text: str) -> int:
            if not text.isdecimal() or int(text) < low:
                raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {low}")
            return int(text)

        return read

    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="a GGUF file that both programs read")
    add("--peer", required=True, metavar="PATH", help="the llama-bench program")
    add("-p", "--prompt", type=count(0), default=512, metavar="N", help="0 leaves it out (512)")
    add("-n", "--decode", type=count(0), default=128, metavar="N", help="0 leaves it out (128)")
    add("--pairs", type=count(1), default=5, metavar="N", help="pairs of processes (5)")
    add("-r", "--repeats", type=count(1), default=3, metavar="N", help="runs in a process (3)")
    add("-t", "--threads", type=count(1), metavar="N", help="of both (default: physical cores)")
    add("--strata", metavar="COMMAND", help="the strata program (default: this checkout's)")
    add("--strata-args", default="", metavar="ARGS", help="more for strata, as --strata-args='...'")
    add("--peer-args", default="", metavar="ARGS", help="more for the peer, as --peer-args='...'")
    add("--timeout", type=float, default=900, metavar="S", help="limit of one process (900)")
    add("--json", metavar="OUT", help="write commands, versions, machine and all figures there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the document; returns the exit code."""
    made = parser()
    given = made.parse_args(arguments)
    if not (given.prompt or given.decode):
        made.error("-p 0 and -n 0 leave nothing to measure")
    if not Path(given.model).is_file():
        made.error(f"there is no file {given.model}")
    if given.json and not os.access(Path(given.json).parent, os.W_OK):
        made.error(f"{given.json} cannot be written")
    program = shlex.split(given.strata) if given.strata else [sys.executable, "-m", "strata_core"]
    try:
        _compare(given, program)
    except Failed as error:
        print(f"side_by_side: {error}", file=sys.stderr)
        return 1
    return 0


def _compare(given: argparse.Namespace, program: Sequence[str]) -> None:
    version = run([*program, "--version"], given.timeout).strip()
    version += "" if given.strata else checkout()
    # The doctor leaves with 1 where it found something wrong; the facts are there all the same.
    machine = read_machine(run([*program, "doctor", "--json"], given.timeout, fine=(0, 1)))
    asked = Asked(given.prompt, given.decode, given.repeats, given.threads or machine["cores"])
    commands = {
        "strata": strata_command(program, given.model, asked, given.strata_args),
        "peer": peer_command(given.peer, given.model, asked, given.peer_args),
    }
    print(f"{machine['cpu_model']}, {machine['cores']} cores, {asked.threads} threads; {version}")
    for name, command in commands.items():
        print(f"{name}: {shlex.join(command)}")
    kinds = list(asked.tokens)
    print("\n" + heading(kinds), flush=True)
    pairs = measure(
        commands,
        asked,
        given.pairs,
        lambda command: run(command, given.timeout),
        lambda number, pair: print(line(number, pair_numbers(pair, kinds)), flush=True),
    )
    print(summary_lines(summary(pairs, kinds)))
    if given.json:
        document = report(Path(given.model), machine, asked, commands, version, pairs)
        Path(given.json).write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
