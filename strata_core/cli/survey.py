"""What is installed and what would be chosen here, for `strata plugins` and `strata doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from strata_core.cli.words import table

if TYPE_CHECKING:
    from strata_core.config import Settings
    from strata_core.errors import Degradation
    from strata_core.machine import Machine


@frozen
class Survey:
    """`plugin_report.report_plugins`'s report, and what its selections make worse."""

    report: dict[str, Any]
    degradations: tuple[Degradation, ...]


def survey(settings: Settings, machine: Machine) -> Survey:
    """What is installed and what would be chosen, for this machine and these settings.

    A source is chosen for a model, so one is looked up here only where the settings name it.
    """
    from strata_core.plugin_report import report_plugins
    from strata_core.plugins import load_plugins, probe_catalogue
    from strata_core.selection import (
        AUTO,
        Selection,
        select_allocator,
        select_backend,
        select_source,
    )

    found = load_plugins(blocked=settings.block_plugins)
    probes = probe_catalogue(found, machine)
    backend = select_backend(found.backends, found.broken, probes["backend"], settings.backend)
    selections: dict[Any, Any] = {"backend": backend}
    if isinstance(backend, Selection):
        selections["allocator"] = select_allocator(
            found.allocators, found.broken, probes["allocator"], backend.name, settings.allocator
        )
    if settings.source != AUTO:
        selections["source"] = select_source(
            found.sources, found.broken, probes["source"], settings.source, ""
        ).settled
    chosen = [item for item in selections.values() if isinstance(item, Selection)]
    return Survey(
        report_plugins(found, selections, probes),
        tuple(item.degradation for item in chosen if item.degradation),
    )


def refusals(report: dict[str, Any]) -> list[dict[str, str]]:
    """The selections that ended in an error, each with its three lines."""
    return [chosen["error"] for chosen in report["selections"].values() if "error" in chosen]


def report_text(report: dict[str, Any]) -> str:
    """The report as text: the records of each role, what was chosen and why, what is broken."""
    from strata_core.plugin_report import LISTS

    parts = []
    for role, member in LISTS.items():
        rows = [_row(item) for item in report[member]]
        parts.append(table([role, "from", "", "what"], rows))
        chosen = report["selections"].get(role)
        if chosen is not None and "error" not in chosen:
            parts.append(chosen_text(chosen))
        elif role == "source" and chosen is None:
            parts.append("  chosen for each model: `strata plan MODEL` says which\n")
        parts.append("\n")
    notes = [_three_lines("not chosen", error) for error in refusals(report)]
    notes += [_broken(item) for item in report["broken"]]
    notes += [_blocked(item) for item in report["blocked"]]
    parts += [note + "\n" for note in notes]
    return "".join(parts).rstrip("\n") + "\n"


def _row(item: dict[str, Any]) -> tuple[str, str, str, str]:
    state = "usable" if item["usable"] else "not usable"
    if item["selected"]:
        state = "chosen"
    what = item["summary"]
    if not item["usable"]:
        what = item["reason"] + (f" ({item['hint']})" if item["hint"] else "")
    elif item["detail"]:
        what += f" [{item['detail']}]"
    return item["name"], f"{item['distribution']} {item['version']}", state, what


def chosen_text(chosen: Mapping[str, Any]) -> str:
    """A selection's document as text: its reason, and each other record's."""
    lines = [f"  {chosen['name']}, because: {chosen['because']}"]
    lines += [f"  not {other['name']}: {other['reason']}" for other in chosen["runners_up"]]
    return "\n".join(lines) + "\n"


def degradation_text(item: Mapping[str, str]) -> str:
    """A degradation's document as text."""
    return (
        f"degraded: {item['what']}: {item['why']}\n"
        f"  costs: {item['cost']}\n  remedy: {item['remedy']}\n"
    )


def _three_lines(heading: str, error: dict[str, str]) -> str:
    return f"{heading}: {error['what']}\n  {error['why']}\n  {error['remedy']}\n"


def _broken(item: dict[str, Any]) -> str:
    where = f"{item['distribution']} {item['version']} ({item['entry_point']})"
    return f"broken: {where}, at the stage {item['stage']!r}\n  {item['error']}\n"


def _blocked(item: dict[str, Any]) -> str:
    kept = ", ".join(item["entry_points"]) or "nothing of that name is installed"
    return f"blocked: {item['name']} ({kept})\n"
