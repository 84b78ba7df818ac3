"""`strata doctor`: this machine's facts, the settings and their origins, and what is wrong."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from strata_core import __version__
from strata_core.cli.command import Invocation, command
from strata_core.cli.console import Console
from strata_core.cli.survey import degradation_text, refusals, report_text, survey
from strata_core.cli.words import size, table
from strata_core.config import Settings, cache_folder, resolve, variable_degradations
from strata_core.errors import StrataError
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from pathlib import Path

    from strata_core.machine import Machine


@command("doctor", groups=LOADING, checked=False)
def command_object(invocation: Invocation) -> int:
    """Report this machine's facts, the settings with their origins, and what is wrong.

    With --json the document is also what `strata plan --machine` reads to plan for this computer
    on another one. Leaves with exit code 1 where something is wrong, 2 where a setting is, after
    reporting all of it.
    """
    from strata_core.machine import read_machine

    machine = read_machine()
    settings, mistakes = _settings(invocation)
    problems = mistakes + _variable_problems()
    # Probes ask the machine for more facts, which then stand in its document.
    surveyed = survey(settings, machine)
    report = surveyed.report
    problems += refusals(report) + [_broken_problem(item) for item in report["broken"]]
    problems += _pinning_problems(settings, machine)
    folder = settings.cache_dir or cache_folder()
    problems += _cache_problems(folder)
    degradations = [item.as_json() for item in surveyed.degradations]
    document = {
        "strata": __version__,
        "machine": machine.to_json(),
        "settings": settings.rows(),
        "cache_folder": None if folder is None else str(folder),
        "plugins": report,
        "degradations": degradations,
        "problems": problems,
    }
    invocation.console.document(document)
    _print(invocation.console, machine, document)
    return 2 if mistakes else 1 if problems else 0


def _settings(invocation: Invocation) -> tuple[Settings, list[dict[str, str]]]:
    """The settings in force, or the defaults and the error that they have."""
    try:
        return invocation.settings(), []
    except StrataError as error:
        return resolve({}, environ={}), [error.as_json()]


def _variable_problems() -> list[dict[str, str]]:
    return [
        {"what": item.what, "why": item.why, "remedy": item.remedy}
        for item in variable_degradations()
    ]


def _pinning_problems(settings: Settings, machine: Machine) -> list[dict[str, str]]:
    """A driver that could pin no more: by the kernel's log, or by how the last start ended."""
    from strata_core.engine.start.diagnosis import diagnose, probes_made, recall

    folder = settings.cache_dir or cache_folder()
    found = diagnose(machine, recall(folder), probes_made(folder))
    return [] if found is None else [found.as_json()]


def _cache_problems(folder: Path | None) -> list[dict[str, str]]:
    """A folder for what starts remember that takes no file, by writing one that goes at once."""
    cost = "every start compiles its kernels, finds out limits and measures rates anew"
    remedy = "give a folder that can be written to with STRATA_CACHE_DIR"
    if folder is None:
        what = "there is no folder for what starts remember"
        return [{"what": what, "why": f"the system names no home folder: {cost}", "remedy": remedy}]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"strata")
    except OSError as error:
        what = f"the cache folder {folder} cannot be written to"
        return [{"what": what, "why": f"{error.strerror or error}: {cost}", "remedy": remedy}]
    return []


def _broken_problem(item: dict[str, Any]) -> dict[str, str]:
    return {
        "what": f"a plugin of {item['distribution']} {item['version']} did not load",
        "why": f"{item['entry_point']}: {item['error']}",
        "remedy": "update or remove it, or block it with STRATA_BLOCK_PLUGINS",
    }


def _print(console: Console, machine: Machine, document: dict[str, Any]) -> None:
    console.line(f"strata {__version__}")
    folder = document["cache_folder"] or "none"
    console.text(table([], [*_facts(machine), ("cache folder", folder)]))
    console.line()
    rows = [(item["key"], _value(item["value"]), item["origin"]) for item in document["settings"]]
    console.text(table(["setting", "value", "origin"], rows))
    console.line()
    console.text(report_text(document["plugins"]))
    for item in document["degradations"]:
        console.text("\n" + degradation_text(item))
    console.line()
    for item in document["problems"]:
        console.line(f"problem: {item['what']}\n  {item['why']}\n  {item['remedy']}")
    if not document["problems"]:
        console.line("no problems found")


def _facts(machine: Machine) -> list[tuple[str, str]]:
    system = f"{machine.os} {machine.release}, {machine.architecture}"
    if machine.wsl:
        system += f", WSL {machine.wsl}"
    if machine.container:
        system += f", in a container ({', '.join(machine.container)})"
    cores = f"{machine.physical_cores} cores, {machine.logical_cores} threads"
    if machine.cpu_quota is not None:
        cores += f", of which a cgroup grants {machine.cpu_quota:g}"
    memory = f"{size(machine.ram_available)} of {size(machine.ram_installed)} available"
    if machine.cgroup_memory_limit is not None:
        memory += f", a cgroup limits it to {size(machine.cgroup_memory_limit)}"
    locked = "unlimited" if machine.memlock_limit is None else size(machine.memlock_limit)
    adapters = "not known" if machine.adapters is None else "none found"
    if machine.adapters:
        adapters = ", ".join(f"{item.vendor}:{item.device}" for item in machine.adapters)
    return [
        ("system", system),
        ("python", machine.python),
        ("processor", f"{machine.cpu_model or 'not known'}: {cores}"),
        ("memory", memory),
        ("may lock", locked),
        ("adapters", adapters),
    ]


def _value(value: object) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
