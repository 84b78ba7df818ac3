"""Reading what the two programs print; anything else than what was asked for is an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from strata_core.cli.compare.figures import Asked, Figures, Kind
from strata_core.errors import StrataError


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
    threads = _member(document, "machine", dict).get("threads")
    if asked.named:
        _check("threads", {threads}, asked.threads)
    for tier in _member(_member(document, "plan", dict), "memory", list):
        for item in _member(tier, "items", list):
            if _member(tier, "kind", str).startswith("vram"):
                _member(item, "actual", int)
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
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, form):
        raise NotFigures(f"no figures in what it printed: {text.strip()[:200] or 'nothing'}")
    return document


def _member(body: Any, name: str, form: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    allowed = (int, float) if form is float else form
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise NotFigures(f"{name!r} is missing from the figures, or of another form than known")
    return value


def _rates(values: Sequence[Any], kind: str, asked: Asked) -> tuple[float, ...]:
    _check(f"{kind} repeats", {len(values)}, asked.repeats)
    if not all(isinstance(v, int | float) and 0 < v < float("inf") for v in values):
        raise NotFigures(f"the {kind} figures {list(values)} are not all speeds")
    return tuple(float(v) for v in values)


def _check(what: str, found: set[Any], wanted: int) -> None:
    if found != {wanted}:
        raise NotFigures(f"{what}: {wanted} asked for, found {', '.join(map(str, found))}")
