"""The file of results: carried from call to call, written after each cell, shown as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, field
from cells import BOUND_GOAL

FORMAT, VERSION = "strata-device-tables", 1


@define
class State:
    """What was measured so far: machines (one for each call), and cells by name."""

    path: Path
    setup: dict[str, Any]
    machines: list[dict[str, Any]] = field(factory=list)
    cells: dict[str, dict[str, Any]] = field(factory=dict)

    def has(self, name: str) -> bool:
        """Whether a cell was measured, without an error."""
        return "error" not in self.cells.get(name, {"error": ""})

    def put(self, name: str, found: dict[str, Any]) -> None:
        """Keep a cell's result, and write the file."""
        self.cells[name] = {**found, "machine": len(self.machines) - 1}
        self.write()

    def write(self) -> None:
        """Write all of it: the old file stays until the new one is whole."""
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "setup": self.setup,
            "machines": self.machines,
            "cells": self.cells,
        }
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", "utf-8")
        beside.replace(self.path)


def read(path: Path, setup: dict[str, Any]) -> State:
    """The state in a file, or a new one. Leaves with a message for one of another set-up."""
    if not path.exists():
        return State(path, setup)
    found = json.loads(path.read_text("utf-8"))
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise SystemExit(f"{path} is no file of results of this program")
    if found["setup"] != setup:
        raise SystemExit(
            f"{path} has results of another set-up: {found['setup']}, and asked for is {setup}; "
            "name another file with --state"
        )
    return State(path, setup, found["machines"], found["cells"])


def spread(values: list[float]) -> dict[str, Any]:
    """Median, lowest, highest, and all of at least one number."""
    return {"median": median(values), "low": min(values), "high": max(values), "all": values}


def in_turn(mine: list[float], others: list[float]) -> dict[str, Any]:
    """The ratios of runs that were made in turn, pair by pair."""
    return spread([a / b for a, b in zip(mine, others, strict=True)])


def markdown(state: State) -> str:
    """All tables, with absolute figures and bounds; then the machines."""
    parts = [_decode(state), _prompts(state), _paths(state), _errors(state), _machines(state)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cells(state: State, table: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (name.partition(" ")[2].replace(" ", " | "), cell)
        for name, cell in state.cells.items()
        if name.startswith(table + " ") and "error" not in cell
    ]


def _table(title: str, columns: str, rows: list[str]) -> str:
    if not rows:
        return ""
    lines = ["|" + "---|" * (columns.count("|") - 1)]
    return "\n".join([f"## {title}", "", columns, *lines, *rows])


def _goal(ratio: float, goal: float | None) -> str:
    if goal is None:
        return f"{ratio:.2f}"
    return f"**{ratio:.2f}** of {goal:g}{'' if ratio >= goal else ' (missed)'}"


def _ratio(ratio: Mapping[str, Any], goal: float | None) -> str:
    return f"{_goal(ratio['median'], goal)}, {ratio['low']:.2f} to {ratio['high']:.2f}"


def _gib(nbytes: int | None) -> str:
    return "not known" if nbytes is None else f"{nbytes / 2**30:.2f}"


def _vram(vram: Mapping[str, Any]) -> str:
    apart = vram["apart"]
    told = "" if apart is None else f", {apart:+.1%}{'' if abs(apart) <= 0.05 else ' (unequal)'}"
    return f"{_gib(vram['strata'])} / {_gib(vram['peer'])}{told}"


def _bound(bound: Mapping[str, Any] | None) -> str:
    if bound is None:
        return "not known"
    return f"{bound['tok_s']:.0f}, {_goal(bound['reached'], BOUND_GOAL)}"


def _us(host: float | None) -> str:
    return "not known" if host is None else f"{host:.0f}"


def _decode(state: State) -> str:
    columns = (
        "| experts in VRAM | skew | Strata tok/s | llama.cpp tok/s | ratio | hit rate | "
        "VRAM GiB, Strata / llama.cpp | bound tok/s, part reached | host us a round | loaded in s |"
    )
    rows = [
        f"| {name} | {cell['strata']['median']:.1f} | {cell['peer']['median']:.1f} | "
        f"{_ratio(cell['ratio'], cell['goal'])} | {cell['hit_rate']:.3f} | "
        f"{_vram(cell['vram'])} | {_bound(cell['bound'])} | {_us(cell['host_us'])} | "
        f"{cell['load_s']:.1f} |"
        for name, cell in _cells(state, "decode")
    ]
    return _table("Decode", columns, rows)


def _prompts(state: State) -> str:
    columns = (
        "| experts in VRAM | skew | tokens | Strata tok/s | llama.cpp tok/s (ubatch) | ratio | "
        "VRAM GiB, Strata / llama.cpp | bound tok/s, part reached |"
    )
    rows = [
        f"| {name} | {tokens} | {one['strata']['median']:.0f} | "
        f"{one['peer']['median']:.0f} ({one['ubatch']}) | {_ratio(one['ratio'], cell['goal'])} | "
        f"{_vram(cell['vram'])} | {_bound(one['bound'])} |"
        for name, cell in _cells(state, "prompts")
        for tokens, one in cell["lengths"].items()
    ]
    return _table("Prompts", columns, rows)


def _paths(state: State) -> str:
    columns = (
        "| path | ready s | decode tok/s | of path 1 | prompt tok/s | of path 1 | decode after the "
        "prompt | what was taken |"
    )
    rows = []
    for _, cell in _cells(state, "paths"):
        first = cell["ways"]["path 1"]
        for name, way in cell["ways"].items():
            decode, prompt = way["decode"]["median"], way["prompt"]["median"]
            rows.append(
                f"| {name} | {way['ready']['median']:.2f} ({way['ready']['low']:.2f} to "
                f"{way['ready']['high']:.2f}) | {decode:.1f} | "
                f"{decode / first['decode']['median']:.3f} | {prompt:.0f} | "
                f"{prompt / first['prompt']['median']:.3f} | {way['after']['median']:.1f} | "
                f"{'; '.join(way['paths'])}{_file(way)} |"
            )
    return _table("Paths", columns, rows)


def _file(way: Mapping[str, Any]) -> str:
    share = way["file_share"]
    if not share:
        return ""
    rate = way["file_bytes_s"]
    disk = "" if rate is None else f", the disk gave {rate / 1e9:.2f} GB/s"
    return f"; {share:.1%} of what no device holds from the file{disk}"


def _errors(state: State) -> str:
    rows = [f"| {name} | {c['error']} |" for name, c in state.cells.items() if "error" in c]
    return _table("Failed", "| cell | why |", rows)


def _machines(state: State) -> str:
    columns = "| call | date | device | driver | GB/s: VRAM, link, CPU, link and CPU together |"
    rows = []
    for number, machine in enumerate(state.machines):
        rates = machine["rates"]
        told = (
            "not measured"
            if rates is None
            else f"{rates['vram']:.0f}, {rates['link']:.1f}, {rates['cpu']:.1f}, "
            f"{rates['link_beside']:.1f} and {rates['cpu_beside']:.1f}"
        )
        rows.append(
            f"| {number} | {machine['date']} | {machine['device']} | {machine['driver']} | {told} |"
        )
    return _table("Machines", columns, rows)
