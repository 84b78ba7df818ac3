"""The table of paths: how long a start takes, and what it gives, for each way to lock host memory.

Paths 1 and 2 are compared with each other: their starts and their runs take turns. Path 3 and the
tier are reported beside them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from cells import Cell
from measure import Rig, common, lanes_of, spread
from strata_side import Strata

from strata_core.cache.profile import read_profile
from strata_core.config import resolve_arguments
from strata_core.verify.identity import subject

GIB = 1 << 30
FROM_FILE = 0.2
"""The part of what is asked for and lies on no device that the tier is to leave in the file."""

PATHS: dict[str, dict[str, Any]] = {
    "path 1": {"source": "sliced-pinned", "complement_pin_gib": "all"},
    "path 2": {"source": "sliced-pinned", "test_complement_refuse": True},
    "path 3": {"source": "sliced-pinned", "complement_pin_gib": 0.0},
}
COMPARED = ("path 1", "path 2")


def paths_cell(rig: Rig, cell: Cell) -> dict[str, Any]:
    """All paths with the cell's part of the experts on the device."""
    experts = cell.experts(rig.experts)
    usual = {
        "expert_cache": experts,
        "max_context": rig.long + rig.decode,
        "expert_profile": str(rig.profile(cell.skew)),
        "adapt_every": 0,
    }
    ways = {name: {**usual, **options} for name, options in PATHS.items()}
    ways["tier"] = {**usual, **_tier(rig, cell, experts, usual)}
    found: dict[str, Any] = {name: {"ready": [], "options": given} for name, given in ways.items()}
    for _ in range(rig.runs - 1):
        for name in COMPARED:
            with rig.load(**ways[name]) as strata:
                found[name]["ready"].append(strata.about["load_s"])
    for together in (COMPARED, ("path 3",), ("tier",)):
        with ExitStack() as stack:
            running = {}
            for name in together:
                running[name] = stack.enter_context(rig.load(**ways[name]))
                found[name]["ready"].append(running[name].about["load_s"])
            for name, figures in _measured(rig, running).items():
                found[name] |= figures
    for figures in found.values():
        figures["ready"] = spread(figures["ready"])
    return {"goal": None, "long": rig.long, "ways": found}


def _measured(rig: Rig, running: dict[str, Strata]) -> dict[str, dict[str, Any]]:
    """Decode, the long prompt, and decode once more: run by run in turn."""
    phases = {
        "decode": ("decode", rig.decode),
        "prompt": ("prompt", rig.long),
        "after": ("decode", rig.decode),
    }
    runs: dict[str, dict[str, list[Any]]] = {
        name: {phase: [] for phase in phases} for name in running
    }
    for phase, (kind, tokens) in phases.items():
        for number in range(rig.runs + 1):
            for name, strata in running.items():
                one = strata.run(kind, tokens, number)
                if number:  # the first warms up
                    runs[name][phase].append(one)
    return {name: _figures(rig, running[name], of_way) for name, of_way in runs.items()}


def _figures(rig: Rig, strata: Strata, runs: dict[str, list[Any]]) -> dict[str, Any]:
    decoded = runs["decode"]
    experts = lanes_of(decoded, "experts", rig.decode * len(decoded))
    missing = sum(experts[lane] for lane in ("pcie", "cpu"))
    nbytes = lanes_of(decoded, "bytes", 1)["file"]
    seconds = sum(run["seconds"] for run in decoded)
    return {
        **{phase: spread([run["tok_s"] for run in of]) for phase, of in runs.items()},
        "experts_a_token": experts,
        "file_share": experts["file"] / missing if missing else 0.0,
        "file_bytes_s": nbytes / seconds if nbytes else None,
        **common(strata, []),
    }


def _tier(rig: Rig, cell: Cell, experts: int, usual: dict[str, Any]) -> dict[str, Any]:
    """A tier that leaves the wanted part in the file, by the counts of the profile."""
    profile = read_profile(rig.profile(cell.skew))
    counts = sorted((n for row in profile.counts.values() for n in row), reverse=True)[experts:]
    held, kept = 0, 0
    while held < len(counts) and kept < (1 - FROM_FILE) * sum(counts):
        kept += counts[held]
        held += 1
    options = {"backend": rig.backend, **rig.options, **usual, "source": "tiered-file"}
    facts = subject(rig.model, rig.model, resolve_arguments(options)).facts
    budget = (facts.beside + held * facts.cells / facts.experts + 1) / GIB
    return {"source": "tiered-file", "ram_budget": budget}
