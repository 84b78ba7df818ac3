"""llama.cpp's side of a table: llama-bench on the same file, with as much of the device."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from strata_side import Failed

from strata_core.cli.compare.turns import run
from strata_core.errors import StrataError

EQUAL = 0.05
"""How far apart the device memory of both may be, as a part of Strata's."""


@frozen(kw_only=True)
class Peer:
    """llama-bench, and where it puts the model: the experts of so many layers stay on the CPU.

    `device` False: all of it stays there. `layers` is the number of layers with experts.
    """

    program: Path
    model: Path
    threads: int
    device: bool
    layers: int
    on_cpu: int = 0
    patience: float = 600.0
    more: tuple[str, ...] = field(default=())

    def command(self, prompts: Sequence[int], decode: int, ubatches: Sequence[int]) -> list[str]:
        """One process: each prompt length with each ubatch, or so many rounds; one repeat."""
        where = ["-ngl", "0", "-dev", "none"]
        if self.device:
            where = ["-ngl", "99", "-ncmoe", str(self.on_cpu)]
        sizes = ["-ub", ",".join(map(str, ubatches)), "-b", str(max(ubatches))] if ubatches else []
        lengths = ",".join(map(str, prompts)) if prompts else "0"
        return [
            *(str(self.program), "-m", str(self.model), "-p", lengths, "-n", str(decode)),
            *("-r", "1", "-t", str(self.threads), "-o", "json", *where, *sizes, *self.more),
        ]

    def measure(
        self, prompts: Sequence[int] = (), decode: int = 0, ubatches: Sequence[int] = ()
    ) -> list[dict[str, Any]]:
        """The rows that it prints. Raises Failed for anything else than what was asked for."""
        command = self.command(prompts, decode, ubatches)
        try:
            rows = json.loads(run(command, self.patience))
        except (StrataError, ValueError) as error:
            raise Failed(f"llama-bench: {' '.join(str(error).split())[:400]}") from error
        wanted = {(length, 0, u) for length in prompts for u in ubatches or [None]}
        wanted |= {(0, decode, u) for u in ubatches or [None]} if decode else set()
        found = {
            (row["n_prompt"], row["n_gen"], row["n_ubatch"] if ubatches else None) for row in rows
        }
        if found != wanted or len(rows) != len(wanted):
            raise Failed(f"{shlex.join(command)} measured {sorted(found)}, not {sorted(wanted)}")
        return list(rows)

    def nearer(self, mine: int | None, its: int | None, layer: int) -> Peer | None:
        """With other layers on the device where it has not as much as Strata; None: no better.

        `mine` and `its` are bytes of device memory, `layer` those of a layer's experts.
        """
        if not self.device or not mine or its is None or abs(its - mine) <= EQUAL * mine:
            return None
        more = round((its - mine) / layer)
        on_cpu = min(self.layers, max(0, self.on_cpu + more))
        return evolve(self, on_cpu=on_cpu) if on_cpu != self.on_cpu else None


def rate(row: dict[str, Any]) -> float:
    """Tokens a second of a row's one repeat."""
    (value,) = row["samples_ts"]
    return float(value)


def built(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the program and the devices it used."""
    names = ("build_commit", "build_number", "backends", "gpu_info", "cpu_info", "n_threads")
    return {name: row.get(name) for name in names}
