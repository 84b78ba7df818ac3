"""A model loaded for one command, and what every command tells about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strata_core.cli.command import Invocation
from strata_core.cli.logs import shown_log

if TYPE_CHECKING:
    from strata_core.api import Model
    from strata_core.selection import Selection

LANES = ("hit", "pcie", "cpu", "helper", "file")
"""The lanes that counters are given for, also where a model's parts have no such lane."""


@contextmanager
def loaded(invocation: Invocation, name: str, **options: Any) -> Iterator[Model]:
    """The model that MODEL names, loaded with the settings in force, with progress shown.

    `options` are settings by key that the command itself decides; they come before the user's.
    """
    from strata_core.api import load

    progress = invocation.console.progress()
    with shown_log(progress.tell, quiet=invocation.console.quiet):
        try:
            model = load(name, settings=invocation.settings(), progress=progress, **options)
        finally:
            progress.close()
        with model:
            yield model


def facts(model: Model) -> dict[str, Any]:
    """What every document about a loaded model holds.

    Selections, counters, the split between lanes, reads that were verified, degradations, the plan
    beside what became of it, and whether tokens are those of docs/arithmetic.md.
    """
    counters = model.counters
    return {
        "selections": [selection.as_json() for selection in model.selections],
        "exact": model.capabilities.exact,
        "own_order": model.capabilities.own_order,
        "counters": {
            lane: dict(counters.get(lane, {"experts": 0, "bytes": 0}))
            for lane in (*LANES, *(lane for lane in counters if lane not in LANES))
        },
        "reads": model.reads,
        "plan": model.beside.as_json(counters),
        "lanes": model.lanes,
        "degradations": [item.as_json() for item in model.degradations],
    }


def notes(model: Model) -> list[str]:
    """Lines for the user: the plan beside what became of it, how rounds ran, what would help."""
    return [
        *model.beside.lines(model.counters),
        *_rounds(model.lanes or {}),
        *(f"degraded: {item}" for item in model.degradations),
    ]


def _rounds(lanes: Mapping[str, Any]) -> list[str]:
    """The dispatch mode of rounds and why, where a device has one."""
    told = lanes.get("dispatch")
    return [f"rounds: {told['mode']}, because: {told['because']}"] if told else []


def chosen(selections: Iterable[Selection]) -> str:
    """The selections in a few words, e.g. "backend cpu, source arena"."""
    return ", ".join(f"{item.role} {item.name}" for item in selections)
