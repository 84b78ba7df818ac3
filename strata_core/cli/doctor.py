"""`strata doctor`: this machine's facts, the settings and their origins, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata_core import __version__
from strata_core.cli.command import Invocation, command
from strata_core.cli.console import Console
from strata_core.cli.survey import refusals, report_text, survey
from strata_core.cli.words import size, table
from strata_core.config import Settings, did_you_mean, resolve, unknown_variables
from strata_core.errors import Degradation, StrataError
from strata_core.setting_table import LOADING, SETTINGS

if TYPE_CHECKING:
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
    report = survey(settings, machine)
    problems += refusals(report) + [_broken_problem(item) for item in report["broken"]]
    degradations = [item.as_json() for item in _degradations(report)]
    document = {
        "strata": __version__,
        "machine": machine.to_json(),
        "settings": settings.rows(),
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
    known = [setting.env for setting in SETTINGS if not setting.pending]
    return [
        {
            "what": f"the environment variable {name} is none of Strata's",
            "why": "it begins like one, but nothing reads it",
            "remedy": did_you_mean(name, known) or "remove it; docs/cli.md lists the variables",
        }
        for name in unknown_variables()
    ]


def _broken_problem(item: dict[str, Any]) -> dict[str, str]:
    return {
        "what": f"a plugin of {item['distribution']} {item['version']} did not load",
        "why": f"{item['entry_point']}: {item['error']}",
        "remedy": "update or remove it, or block it with STRATA_BLOCK_PLUGINS",
    }


def _degradations(report: dict[str, Any]) -> list[Degradation]:
    """A fallback that is taken because nothing else is usable."""
    found = []
    for role, chosen in report["selections"].items():
        if chosen.get("notice"):
            hints = [i["hint"] for i in report[f"{role}s"] if not i["usable"] and i["hint"]]
            found.append(
                Degradation(
                    what=f"the {role} {chosen['name']} is a fallback",
                    why=chosen["because"].removeprefix("the fallback: "),
                    cost="models run, but more slowly than they could",
                    remedy="; ".join(hints) or f"install a plugin with a {role} for this machine",
                )
            )
    return found


def _print(console: Console, machine: Machine, document: dict[str, Any]) -> None:
    console.line(f"strata {__version__}")
    console.text(table([], _facts(machine)))
    console.line()
    rows = [(item["key"], _value(item["value"]), item["origin"]) for item in document["settings"]]
    console.text(table(["setting", "value", "origin"], rows))
    console.line()
    console.text(report_text(document["plugins"]))
    for item in document["degradations"]:
        console.line()
        console.line(f"degraded: {item['what']}: {item['why']}")
        console.line(f"  costs: {item['cost']}")
        console.line(f"  remedy: {item['remedy']}")
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
