"""Reading what the two programs print; anything else than what was asked for is an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from strata_core.cli.compare.figures import Asked, Figures, Kind
from strata_core.errors import StrataError

DEEPEST = 32
"""How deep lists and objects may lie in one another; what is known lies less than half as deep."""

SLOWEST, FASTEST = 1e-9, 1e15
"""Tokens a second that can be: between them no ratio leaves what JSON can hold."""

SHOWN = 200
"""Characters of what was printed that an error shows."""


class NotFigures(StrataError):
    """A program printed something else than the figures that it was asked for."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "a program did not answer with the figures that it was asked for",
            why,
            "run its command by hand; only a version that prints these figures can be compared",
        )


def read_strata(text: str, asked: Asked) -> Figures:
    """The figures in a document of `strata bench --json`. Raises NotFigures."""
    document = _json(text, dict)
    samples: dict[Kind, tuple[float, ...]] = {}
    for kind, tokens in asked.tokens.items():
        rows = _member(_member(document, "samples", dict), kind, list)
        _check(f"tokens of a {kind} run", {_member(row, "tokens", int) for row in rows}, tokens)
        samples[kind] = _rates([_member(row, "tok_s", float) for row in rows], kind, asked)
    machine = _member(document, "machine", dict)
    if asked.named:
        _check("threads", {_member(machine, "threads", int)}, asked.threads)
    for tier in _member(_member(document, "plan", dict), "memory", list):
        on_device = _member(tier, "kind", str).startswith("vram")
        for item in _member(tier, "items", list):
            if on_device:
                _member(item, "name", str)
                _bytes(_member(item, "actual", int))
    names = ("machine", "selections", "degradations", "kv", "seed", "timings", "counters", "plan")
    return Figures(samples, {name: document[name] for name in names if name in document})


def read_llama_bench(text: str, asked: Asked) -> Figures:
    """The figures in what `llama-bench -o json` prints. Raises NotFigures."""
    rows = [row for row in _json(text, list) if isinstance(row, dict)]
    samples: dict[Kind, tuple[float, ...]] = {}
    for kind, tokens in asked.tokens.items():
        lengths = (tokens, 0) if kind == "prompt" else (0, tokens)
        found = [row for row in rows if (row.get("n_prompt"), row.get("n_gen")) == lengths]
        _check(f"{kind} tests of {tokens} tokens", {len(found)}, 1)
        _check("threads", {_member(found[0], "n_threads", int)}, asked.threads)
        samples[kind] = _rates(_member(found[0], "samples_ts", list), kind, asked)
    _check("tests", {len(rows)}, len(samples))
    names = (
        *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type"),
        *("n_batch", "n_ubatch", "n_gpu_layers", "n_cpu_moe", "type_k", "type_v", "flash_attn"),
    )
    return Figures(samples, {name: rows[0][name] for name in names if name in rows[0]})


def _json(text: str, form: type) -> Any:
    """The document, of the form; what a comparison's own document could not hold is refused."""
    try:
        document = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, form):
        raise NotFigures(f"no figures in what it printed: {text.strip()[:SHOWN] or 'nothing'}")
    level = [document]
    for _ in range(DEEPEST):
        level = [inner for item in level for inner in _inner(item)]
    if level:
        raise NotFigures(f"lists and objects lie more than {DEEPEST} deep in what it printed")
    return document


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:SHOWN]} is no finite number")
    return number


def _inner(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()


def _bytes(count: int) -> None:
    if not 0 <= count < 1 << 63:
        raise NotFigures(f"{str(count)[:SHOWN]} is no count of bytes")


def _member(body: Any, name: str, form: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    allowed = (int, float) if form is float else form
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise NotFigures(f"{name!r} is missing from the figures, or of another form than known")
    return value


def _rates(values: Sequence[Any], kind: str, asked: Asked) -> tuple[float, ...]:
    _check(f"{kind} repeats", {len(values)}, asked.repeats)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if not numbers or not all(SLOWEST <= v <= FASTEST for v in values):
        raise NotFigures(f"the {kind} figures {str(list(values))[:SHOWN]} are not all speeds")
    return tuple(float(v) for v in values)


def _check(what: str, found: set[Any], wanted: int) -> None:
    if found != {wanted}:
        raise NotFigures(f"{what}: {wanted} asked for, found {', '.join(map(str, found))[:SHOWN]}")
