"""The rates that a plan's prediction goes by: measured by earlier runs where there were any.

A run whose bytes all came by one lane tells that lane's rate for its model; a run with the tiered
file tells the file's. They are kept in the folder for caches, a file for each model, backend and
shape of machine: what its devices are, and how many threads compute.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, cast, get_args

from strata_core.cache.rank import ranking, rates
from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings, cache_folder
from strata_core.engine.devices import is_simulated
from strata_core.engine.tier import Known
from strata_core.interfaces import BackendRecord
from strata_core.kernels.cpu.backend import threads_of
from strata_core.kernels.device.dense import lone_embedding
from strata_core.kernels.program import Program, Weight
from strata_core.machine import Machine
from strata_core.plan.speed import Lane, Pace, Rate
from strata_core.runtime import Device

_LOG = logging.getLogger("strata.plan")
_FORMAT, _VERSION = "strata-rates", 1
_LARGEST = 1 << 16

RECORDED = "recorded on another machine"
"""The origin of a rate that nothing here has measured."""

MEASURED = "measured here"
"""The origin of a rate that an earlier run of this model left."""

DEFAULTS: Mapping[Lane, float] = {"vram": 1189e9, "link": 50e9, "file": 1.4e9}
"""What exact kernels read of VRAM, the link of PCIe 5 x16, a disk: figures of the machine
that docs/experiments.md names at its beginning, as are those below."""

HOST_A_THREAD, HOST_MOST = 9.5e9, 91e9
"""What the CPU's threads read of host memory there: each alone, and 16 of them together."""

OPS_A_UNIT, PLAIN_OPS_A_UNIT = 84e12 / 132, 13e12 / 132
"""Operations a second of a prompt's products for each multiprocessor, with its matrix units and
where it has none: what section 7 there reckons with, and section 8 had; section 12 does more."""

OPS_A_THREAD = 50e9
"""The same of a CPU's thread."""

SHORT = 8
"""Rounds fewer than these tell no rate."""


def pace(
    checkpoint: Checkpoint,
    program: Program,
    settings: Settings,
    machine: Machine,
    known: Known,
    backend: BackendRecord,
    measured: Path | None,
    devices: Sequence[Device] = (),
) -> Pace:
    """What is known about this machine and model for a prediction.

    `measured` is where rates of earlier runs are, of `rates_path`; the first of `devices` computes
    prompts. The devices of a simulated accelerator are the CPU, and so are their rates.
    """
    experts = checkpoint.experts
    order = known.order or ranking(None, list(experts.layouts), experts.count)
    threads = settings.threads or threads_of(machine)
    host = min(HOST_MOST, HOST_A_THREAD * threads)
    defaults: dict[Lane, float] = {**DEFAULTS, "host": host}
    compute = _compute(devices[0]) if devices else 0.0
    if is_simulated(backend):
        defaults |= {"vram": host, "link": host}
        compute = OPS_A_THREAD * threads
    found: dict[Lane, Rate] = {lane: Rate(value, RECORDED) for lane, value in defaults.items()}
    share = settings.options().get("pcie_frac", 0.0)
    return Pace(
        rates={**found, **recalled(measured)},
        dense=_dense(checkpoint, program),
        asked=rates(known.profile, order, checkpoint.hyper.top_k / max(1, experts.count)),
        link_share=None if share in (None, "auto") else float(share),
        cached=machine.memory_available,
        compute=Rate(compute, RECORDED) if devices and compute else None,
    )


def _compute(device: Device) -> float:
    """Operations a second of a prompt's products there."""
    return device.units * (OPS_A_UNIT if device.matrix else PLAIN_OPS_A_UNIT)


def token_ops(checkpoint: Checkpoint, program: Program) -> int:
    """Operations of the products of one token of a prompt, of which no logits are wanted."""
    count = 0
    for op in program.ops:
        if op.kernel == "linear" and getattr(op.args["x"], "rows", "") != "logits":
            weight = op.args["weight"]
            assert isinstance(weight, Weight)
            count += prod(checkpoint.tensor(weight.role, weight.layer).shape)
        elif op.kernel == "experts":
            layer = op.args["layer"]
            assert isinstance(layer, int)
            parts = checkpoint.experts.layouts[layer].parts
            count += program.top_k * sum(part.rows * part.columns for part in parts)
    return 2 * count


def _dense(checkpoint: Checkpoint, program: Program) -> int:
    """Bytes of dense weights that a token reads: all but the table of which it reads a row."""
    table = lone_embedding(program)
    total = 0
    for weight in program.weights():
        tensor = checkpoint.tensor(weight.role, weight.layer)
        rows = max(1, prod(tensor.shape[:-1]))
        total += tensor.nbytes // rows if weight == table else tensor.nbytes
    return total


# --- between runs ------------------------------------------------------------------------------


def rates_path(
    checkpoint: Checkpoint,
    settings: Settings,
    machine: Machine,
    backend: str,
    devices: Iterable[Device],
) -> Path | None:
    """Where a model's rates are kept for a backend with these devices and as many threads.

    None where there is no folder for it, and for a machine that is replayed: what was measured here
    says nothing about it.
    """
    folder = settings.cache_dir or cache_folder()
    if folder is None or machine.replayed:
        return None
    shape = [settings.threads or threads_of(machine), *(device.name for device in devices)]
    short = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return folder / "rates" / f"{checkpoint.model_hash}-{backend}-{short}.json"


def recalled(path: Path | None) -> dict[Lane, Rate]:
    """What earlier runs measured; a file that is not one of ours counts for nothing."""
    found: Any = None
    if path is not None:
        with suppress(OSError, ValueError, RecursionError), path.open("rb") as stream:
            found = json.loads(stream.read(_LARGEST))
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (
        _FORMAT,
        _VERSION,
    ):
        return {}
    rows = found.get("bytes_s")
    return {
        cast("Lane", lane): Rate(float(rows[lane]), MEASURED)
        for lane in get_args(Lane)
        if isinstance(rows, dict) and _is_rate(rows.get(lane))
    }


def _is_rate(value: object) -> bool:
    """Whether it can be bytes a second of any machine."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e3 < value < 1e15


def remember(path: Path | None, measured: Mapping[Lane, float]) -> None:
    """Keep rates beside those that are kept already; where that cannot be written, none are."""
    if path is None or not measured:
        return
    known = {lane: rate.bytes_s for lane, rate in recalled(path).items()}
    document = {"format": _FORMAT, "version": _VERSION, "bytes_s": {**known, **measured}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        _LOG.info("what was measured is not kept: %s", error)
