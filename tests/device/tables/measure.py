"""How a cell is measured: Strata stays loaded, its runs and llama-bench's processes take turns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve, frozen
from bounds import decode_bound, prompt_bound, slots_of, vram_of
from cells import Cell
from machine import Meter
from peer_side import Peer, built, rate
from state import in_turn, spread
from strata_side import Strata

from strata_core.checkpoint.hyper import Hyper

OTHER_SEED = 1001
"""Seed of the ids that profiles are recorded from; measured runs have another one."""

SIZINGS = 3
"""Processes of the peer at most, until its device memory is as near to Strata's as it can be."""


@frozen(kw_only=True)
class Rig:
    """All that stays the same for the cells of a call."""

    model: Path
    backend: str
    hyper: Hyper
    expert_bytes: int
    peer: Peer
    meter: Meter
    environment: Mapping[str, str]
    rates: Mapping[str, float] | None
    runs: int
    decode: int
    lengths: tuple[int, ...]
    ubatches: tuple[int, ...]
    long: int
    options: Mapping[str, Any]
    folder: Path
    patience: float = 600.0

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return self.hyper.experts * len(self.hyper.moe_layers)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the experts of a layer."""
        return self.expert_bytes // max(1, len(self.hyper.moe_layers))

    def load(self, **options: Any) -> Strata:
        """A worker process with the model loaded. Raises Failed."""
        given = {"backend": self.backend, **self.options, **options}
        if self.backend == "cpu":
            given.pop("expert_cache", None)
        environment = dict(self.environment)
        return Strata(self.model, given, environment, self.folder / "strata.log", self.patience)

    def profile(self, skew: float) -> Path:
        """The profile of the model at this skew; recorded from other ids where there is none."""
        path = self.folder / f"profile-{skew:g}.json"
        if not path.exists():
            with self.load(expert_cache="auto", max_context=self.decode) as strata:
                record(strata, self, path)
        return path


def record(strata: Strata, rig: Rig, path: Path) -> None:
    """Decode other ids than those that are measured, and keep what they asked for."""
    for number in range(4):
        strata.run("decode", rig.decode, number, OTHER_SEED)
    strata.ask("profile", path=str(path))


@contextmanager
def loaded(rig: Rig, cell: Cell, context: int) -> Iterator[tuple[Strata, int | None]]:
    """Strata with the cell's experts, and the bytes in use before; `all` needs no profile."""
    experts = cell.experts(rig.experts)
    options: dict[str, Any] = {"expert_cache": experts, "max_context": context}
    path = rig.folder / f"profile-{cell.skew:g}.json"
    if cell.share != "all":
        options["expert_profile"] = str(rig.profile(cell.skew))
    before = rig.meter.now()
    with rig.load(**options) as strata:
        if cell.share == "all" and cell.table == "decode" and not path.exists():
            record(strata, rig, path)
        yield strata, before


def fitted(rig: Rig, cell: Cell) -> Peer:
    """The peer with the cell's part of the layers on the device, before anything is known."""
    layers = rig.peer.layers
    return evolve(rig.peer, on_cpu=layers - round(layers * cell.experts(rig.experts) / rig.experts))


def sized(
    rig: Rig, peer: Peer, mine: int | None, **tests: Any
) -> tuple[Peer, list[dict[str, Any]], int | None]:
    """The peer with as much of the device as Strata, the rows of its last try, and its bytes."""
    for last in range(SIZINGS):
        before = rig.meter.now()
        with rig.meter.most() as most:
            rows = peer.measure(**tests)
        its = most[0] - before if most and before is not None else None
        better = peer.nearer(mine, its, rig.layer_bytes)
        if better is None or last == SIZINGS - 1:
            break
        peer = better
    return peer, rows, its


def taken(rig: Rig, strata: Strata, before: int | None) -> int | None:
    """Bytes that Strata really has of the device; None: nothing tells."""
    now = rig.meter.now()
    return None if now is None or before is None else now - before


def vram(strata: Strata, mine: int | None, its: int | None, peer: Peer) -> dict[str, Any]:
    """What both had of the device."""
    return {
        "strata": mine,
        "peer": its,
        "apart": (its - mine) / mine if mine and its is not None else None,
        "plan": vram_of(strata.about["plan"]),
        "slots": slots_of(strata.about["plan"]),
        "peer_layers_on_cpu": peer.on_cpu if peer.device else None,
    }


def lanes_of(runs: Sequence[Mapping[str, Any]], what: str, tokens: int) -> dict[str, float]:
    """Of all runs together: experts or bytes of each lane a token."""
    lanes = ("hit", "pcie", "cpu", "helper", "file", "entered")
    return {
        lane: sum(run["counters"].get(lane, {}).get(what, 0) for run in runs) / tokens
        for lane in lanes
    }


def hit_rate(experts: Mapping[str, float]) -> float:
    """The part of the experts that were asked for which lay on the first device."""
    asked = sum(experts[lane] for lane in ("hit", "pcie", "cpu", "helper"))
    return experts["hit"] / asked if asked else 0.0


def common(strata: Strata, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What every cell says of Strata."""
    about = strata.about
    return {
        "load_s": about["load_s"],
        "split": about["lanes"],
        "paths": about["plan"]["paths"],
        "selections": about["selections"],
        "degradations": about["degradations"],
        "strata_threads": about["threads"],
        "commands": [shlex.join(strata.command), *map(shlex.join, commands)],
    }


def decode_cell(rig: Rig, cell: Cell) -> dict[str, Any]:
    """One cell of the table of decoding."""
    with loaded(rig, cell, rig.decode) as (strata, before):
        strata.run("decode", rig.decode, 0)
        mine = taken(rig, strata, before)
        peer, rows, its = sized(rig, fitted(rig, cell), mine, decode=rig.decode)
        ours, theirs = [], []
        for number in range(1, rig.runs + 1):
            ours.append(strata.run("decode", rig.decode, number))
            if number > 1:
                rows = peer.measure(decode=rig.decode)
            theirs.append(rate(rows[0]))
        tokens = rig.decode * rig.runs
        experts, nbytes = (lanes_of(ours, what, tokens) for what in ("experts", "bytes"))
        rates = [run["tok_s"] for run in ours]
        hosts = [run["host_us"] for run in ours if run["host_us"] is not None]
        return {
            "goal": cell.goal,
            "strata": spread(rates),
            "peer": spread(theirs),
            "ratio": in_turn(rates, theirs),
            "hit_rate": hit_rate(experts),
            "experts_a_token": experts,
            "bytes_a_token": nbytes,
            "vram": vram(strata, mine, its, peer),
            "bound": decode_bound(
                strata.about, nbytes, rig.decode, rig.decode, rig.rates, median(rates)
            ),
            "host_us": median(hosts) if hosts else None,
            "peer_build": built(rows[0]),
            **common(strata, [peer.command((), rig.decode, ())]),
        }


def prompts_cell(rig: Rig, cell: Cell) -> dict[str, Any]:
    """One share of the table of prompts, all lengths with one load of Strata."""
    with loaded(rig, cell, max(rig.lengths)) as (strata, before):
        for length in rig.lengths:
            strata.run("prompt", length, 0)
        mine = taken(rig, strata, before)
        tests = {"prompts": rig.lengths, "ubatches": rig.ubatches}
        peer, rows, its = sized(rig, fitted(rig, cell), mine, **tests)
        tried = {
            n: {r["n_ubatch"]: rate(r) for r in rows if r["n_prompt"] == n} for n in rig.lengths
        }
        best = {n: max(found, key=lambda u: found[u]) for n, found in tried.items()}
        ours: dict[int, list[dict[str, Any]]] = {n: [] for n in rig.lengths}
        theirs: dict[int, list[float]] = {n: [] for n in rig.lengths}
        for number in range(1, rig.runs + 1):
            for n in rig.lengths:
                ours[n].append(strata.run("prompt", n, number))
            for u in sorted(set(best.values())):
                mine_of = [n for n in rig.lengths if best[n] == u]
                for row in peer.measure(prompts=mine_of, ubatches=[u]):
                    theirs[row["n_prompt"]].append(rate(row))
        commands = [peer.command(rig.lengths, 0, rig.ubatches)]
        return {
            "goal": cell.goal,
            "lengths": {
                str(n): _length(rig, n, ours[n], theirs[n], tried[n], best[n]) for n in rig.lengths
            },
            "vram": vram(strata, mine, its, peer),
            "peer_build": built(rows[0]),
            **common(strata, commands),
        }


def _length(
    rig: Rig,
    tokens: int,
    ours: Sequence[Mapping[str, Any]],
    theirs: list[float],
    tried: Mapping[int, float],
    best: int,
) -> dict[str, Any]:
    """The figures of one length."""
    rates = [run["tok_s"] for run in ours]
    brought = [run["counters"].get("prompt", {"experts": 0, "bytes": 0}) for run in ours]
    nbytes = round(median(one["bytes"] for one in brought))
    return {
        "strata": spread(rates),
        "peer": spread(theirs),
        "ratio": in_turn(rates, theirs),
        "ubatch": best,
        "ubatches": {str(u): value for u, value in tried.items()},
        "brought": brought[-1],
        "bound": prompt_bound(rig.hyper, tokens, nbytes, rig.rates, median(rates)),
    }
