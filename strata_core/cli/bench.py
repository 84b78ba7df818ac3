"""`strata bench`: how fast a model runs, measured as llama-bench measures it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.numbers import whole
from strata_core.cli.timeline import check_timeline, timed_prompt, timeline_path, timeline_text
from strata_core.cli.words import table
from strata_core.errors import EngineError, UsageError
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from strata_core.api import Model
    from strata_core.cli.compare.comparison import Comparison
    from strata_core.engine.bench import Bench, Series
    from strata_core.engine.messages import Finished

_DEFAULTS = {"prompt": 512, "decode": 128, "repeats": 5, "seed": 0}

_COMPARING = {"pairs": 5, "timeout": 900}
"""What --compare goes by where its companions are not given."""

LONGEST = 7 * 24 * 3600
"""Seconds that one process of a comparison may take at most: a week."""


def _option(
    name: str,
    letter: str,
    low: int,
    help: str,  # noqa: A002
    high: int | None = None,
) -> click.Option:
    names = [f"-{letter}" if letter else "", f"--{name}"]
    return click.Option(
        [item for item in names if item],
        type=whole(low, high),
        default=_DEFAULTS.get(name),
        metavar="N",
        help=f"{help} Default: {(_DEFAULTS | _COMPARING)[name]}.",
    )


@command(
    "bench",
    [
        model_argument(),
        _option("prompt", "p", 0, "Tokens of a prompt run; 0 leaves it out."),
        _option("decode", "n", 0, "Tokens of a decode run; 0 leaves it out."),
        _option("repeats", "r", 1, "Runs that count, of each kind."),
        _option("seed", "", 0, "Seed of the token ids."),
        click.Option(
            ["--timeline"],
            metavar="FILE",
            help="Then time a prompt's chunks by layer; write that to FILE as JSON.",
        ),
        click.Option(
            ["--compare"],
            metavar="NAME=PATH",
            help="Run this program (llama-bench=PATH) in turn with the bench, on the same file.",
        ),
        _option("pairs", "", 1, "With --compare: pairs of processes."),
        _option("timeout", "", 1, "With --compare: seconds that one process may take.", LONGEST),
        click.Option(
            ["--peer-args"],
            metavar="ARGS",
            help="With --compare: more flags for the other program, as --peer-args='-ub 2048'.",
        ),
        click.Option(
            ["--report"], metavar="FILE", help="With --compare: write the document to FILE too."
        ),
    ],
    LOADING,
)
def command_object(
    invocation: Invocation,
    model: str,
    prompt: int,
    decode: int,
    repeats: int,
    seed: int,
    timeline: str | None,
    **comparison: Any,
) -> None:
    """Measure how fast MODEL computes a prompt and how fast it generates.

    The two are measured apart, each in an empty context that is as long as the longer of them, or
    as --max-context says: a prompt of random token ids, and random ids fed one by one, with a token
    drawn after each. Of each kind one run is not counted; the figures are medians over the others,
    with the lowest and the highest.

    With --compare the bench and another program run in turn, each in a process of its own and with
    as much of a device, and the ratios of their figures are shown; docs/benchmarks.md says how.

    With --timeline a further prompt, which is not counted, is run on a backend with devices: when
    each layer's experts were copied and computed, and what waited, by the device's clock.
    """
    timed = timeline_path(timeline, prompt)
    context = _context(invocation, model, prompt, decode)
    wanted = _comparison(**comparison)
    if wanted is not None and timed is not None:
        raise UsageError(
            "--timeline and --compare were both given",
            "a comparison runs other processes, whose prompts are not timed by layer",
            "leave one of the two out",
        )
    if wanted is not None:
        from strata_core.cli.compare.comparison import compare

        lengths = {"prompt": prompt, "decode": decode, "repeats": repeats, "seed": seed}
        compare(invocation, model, lengths, wanted)
        return
    with loaded(invocation, model, max_context=context) as running:
        if timed is not None:
            check_timeline(running, timed)  # a bench takes minutes: better now than at its end
        bench = _bench(running, prompt, decode, repeats, seed)
        _show(invocation, model, running, bench, timed)


def _show(
    invocation: Invocation, name: str, model: Model, bench: Bench, timed: Path | None
) -> None:
    """Run everything, and show the figures."""
    console, progress = invocation.console, invocation.console.progress()
    progress.begin("bench", bench.runs, "runs")
    started = time.perf_counter()
    try:
        measured = bench.measure(_generate(model), on_run=progress.reach)
    finally:
        progress.close()
    took = time.perf_counter() - started
    machine = _machine(model)
    console.text(_text(machine, measured))
    chunks: list[Mapping[str, Any]] = []
    if timed is not None:
        chunks = timed_prompt(model, timed, bench.ids("prompt", 0), _generate(model))
    if chunks:
        console.text(timeline_text(chunks))
    console.document(
        {
            "model": name,
            **_figures(bench, measured),
            "context": model.plan.context,
            "kv": model.kv_type,
            "machine": machine,
            **facts(model),
            "timings": _timings(model, measured, took),
            **({"timeline": chunks} if chunks else {}),
        }
    )
    console.note(
        f"loaded in {model.timings['load_s']:.2f} s; ids of seed {bench.seed}; "
        f"{chosen(model.selections)}"
    )
    for line in notes(model):
        console.note(line)


def _comparison(
    compare: str | None,
    pairs: int | None,
    timeout: int | None,
    peer_args: str | None,
    report: str | None,
) -> Comparison | None:
    """What --compare asks for, None without it. Raises UsageError."""
    from strata_core.cli.compare.comparison import Comparison, parse_flags

    if compare is not None:
        if report == "":
            raise UsageError(
                "--report is empty", "it names the file to write", "name a file, or leave it out"
            )
        return Comparison(
            peer=compare,
            pairs=_COMPARING["pairs"] if pairs is None else pairs,
            timeout=_COMPARING["timeout"] if timeout is None else timeout,
            peer_flags=parse_flags(peer_args or ""),
            report=None if report is None else Path(report),
        )
    given = {"--pairs": pairs, "--timeout": timeout, "--peer-args": peer_args, "--report": report}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(
                f"{flag} is given without --compare",
                "it says how to compare with another program",
                "name the program too, with --compare llama-bench=PATH",
            )
    return None


def _context(invocation: Invocation, model: str, prompt: int, decode: int) -> int:
    """The context's length: the longer run, or what --max-context asks for. Raises UsageError."""
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint

    need, flag = max((prompt, f"-p {prompt}"), (decode, f"-n {decode}"))
    if need == 0:
        raise UsageError(
            "there is nothing to measure",
            "-p 0 leaves the prompt out, and -n 0 the continuation",
            "leave one of the two out to get its default",
        )
    checkpoint = open_checkpoint(model_path(model))
    trained = checkpoint.hyper.context
    checkpoint.close()
    asked: int | None = invocation.settings().max_context
    room = trained if asked is None else min(asked, trained)
    if need > room:
        raise UsageError(
            f"{flag} is too long",
            f"{model} was trained on {trained} tokens"
            if room == trained
            else f"--max-context {asked} leaves room for {room} tokens",
            f"give at most {room}",
        )
    return asked or need


def _bench(model: Model, prompt: int, decode: int, repeats: int, seed: int) -> Bench:
    from strata_core.engine.bench import Bench

    tokenizer = model.tokenizer
    begins = tokenizer is not None and tokenizer.bos in tokenizer.encode("")[:1]
    return Bench(
        prompt=prompt,
        decode=decode,
        repeats=repeats,
        seed=seed,
        vocabulary=model.checkpoint.hyper.vocabulary,
        first=tokenizer.bos if tokenizer is not None and begins else None,
    )


def _generate(model: Model) -> Any:
    from strata_core.engine.messages import Finished

    def generate(ids: tuple[int, ...], later: tuple[int, ...], tokens: int) -> Finished:
        last = None
        events = model.generate(ids, max_tokens=tokens, ignore_eos=True, continuation=later)
        for last in events:  # noqa: B007
            pass
        if not isinstance(last, Finished):
            raise EngineError(
                "a run has no end", "its last event is not that of a finished request"
            )
        return last

    return generate


def _machine(model: Model) -> dict[str, Any]:
    """The processor, the cores this process may use, the threads that compute (None: unknown)."""
    from strata_core.machine import read_machine

    machine = read_machine()
    return {
        "cpu_model": machine.cpu_model,
        "physical_cores": machine.physical_cores,
        "logical_cores": machine.logical_cores,
        "cpu_quota": machine.cpu_quota,
        "threads": model.capabilities.threads,
    }


def _figures(bench: Bench, measured: tuple[Series, ...]) -> dict[str, Any]:
    by_kind = {series.kind: series for series in measured}
    figures: dict[str, Any] = {}
    for kind in ("prompt", "decode"):
        series = by_kind.get(kind)
        figures[f"{kind}_tok_s"] = series.tok_s if series else None
        figures[f"{kind}_tok_s_spread"] = list(series.spread) if series else None
    return {
        **figures,
        "prompt_tokens": bench.prompt,
        "decode_tokens": bench.decode,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "samples": {
            series.kind: [
                {
                    "tok_s": run.tok_s,
                    "seconds": run.seconds,
                    "tokens": run.tokens,
                    "rounds": run.rounds,
                    "distinct_ids": run.distinct,
                }
                for run in series.runs
            ]
            for series in measured
        },
    }


def _timings(model: Model, measured: tuple[Series, ...], took: float) -> dict[str, float]:
    """Seconds: loading, the median run of each kind, and everything after loading."""
    runs = {f"{s.kind}_s": median(run.seconds for run in s.runs) for s in measured}
    return {"load_s": model.timings["load_s"], **runs, "total_s": took}


def _text(machine: dict[str, Any], measured: tuple[Series, ...]) -> str:
    count = machine["threads"]
    threads = "threads not known"
    if count is not None:
        threads = "1 thread" if count == 1 else f"{count} threads"
    rows = [
        (
            series.kind,
            str(series.runs[0].tokens),
            str(len(series.runs)),
            *(f"{rate:.2f}" for rate in (series.tok_s, *series.spread)),
        )
        for series in measured
    ]
    return (
        f"{machine['cpu_model'] or 'processor not known'}, "
        f"{machine['physical_cores']} cores, {threads}\n\n"
        + table(["run", "tokens", "runs", "tokens/s", "lowest", "highest"], rows)
    )
