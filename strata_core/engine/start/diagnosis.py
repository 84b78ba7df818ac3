"""Recognising a driver that has run out of memory that it can pin, from the signs it leaves.

The kernel's log names it where it can be read. Elsewhere the sign is a refusal ("out of memory")
with plenty of memory free on the device and in RAM, under WSL 2. A start that is refused remembers
what it saw, so that `strata doctor` can say more later.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from strata_core.machine import Machine
from strata_core.machine.kernel_log import refused_pins
from strata_core.plan.sizes import gib

_FORMAT = "strata-refusal"
_VERSION = 1
_FILE = "last-refusal.json"
_TEXTS = ("doing", "error", "device")
_SIZES = ("vram_free", "vram_total", "ram_available", "pinned")
_PLENTY_RAM = 1 << 30
_PLENTY_SHARE = 8

REMEDY = (
    "install strata-wsl (`pip install 'strata-core[wsl]'`): with it contexts are opened and small "
    "buffers taken before anything else. Where it is there, leave STRATA_EARLY_REMOTE_CONTEXTS "
    "unset and name no other --allocator. Else pin less with STRATA_PIN_LIMIT_GIB, use fewer "
    "devices with --device, or run `wsl --shutdown` in Windows to free what is held"
)


@frozen(kw_only=True)
class Symptom:
    """A refusal in a start: in what phase, what the driver said, and what was free then (bytes).

    `device` is the label of the device concerned; its sizes are 0 where it had no context.
    """

    doing: str
    error: str
    device: str
    vram_free: int
    vram_total: int
    ram_available: int
    pinned: int


@frozen
class Diagnosis:
    """A cause with what shows it, and what to do."""

    what: str
    why: str
    remedy: str

    def as_json(self) -> dict[str, str]:
        """As one of doctor's `problems`."""
        return asdict(self)


def diagnose(machine: Machine, symptom: Symptom | None, probes: int = 0) -> Diagnosis | None:
    """What the signs say, None where they do not point at pinned memory.

    `probes` of what the driver pins were made: each ends with a refusal, which the kernel logs too,
    so that without a start that failed so many lines say nothing.
    """
    what = "the driver has run out of host memory that it can pin"
    log = refused_pins(machine)
    if log.count > (0 if symptom else probes):
        times = "once" if log.count == 1 else f"{log.count} times"
        return Diagnosis(what, f"the kernel logged it {times}: {log.last.strip()}", REMEDY)
    if machine.wsl != 2 or symptom is None or not _plenty(symptom):
        return None
    free = f"{gib(symptom.vram_free)} of {gib(symptom.vram_total)} were free on {symptom.device}"
    if not symptom.vram_total:
        free = f"nothing was on {symptom.device} yet"
    return Diagnosis(
        what,
        f"{symptom.doing} was refused with {symptom.error!r}, though {free} and "
        f"{gib(symptom.ram_available)} of RAM were available; under WSL the driver pins and maps "
        f"little host memory, whatever is free ({gib(symptom.pinned)} were pinned)",
        REMEDY,
    )


def _plenty(symptom: Symptom) -> bool:
    free = symptom.vram_total == 0 or symptom.vram_free * _PLENTY_SHARE >= symptom.vram_total
    return free and symptom.ram_available >= _PLENTY_RAM


# --- between runs ------------------------------------------------------------------------------


def remember(folder: Path | None, symptom: Symptom) -> None:
    """Keep a refusal for `strata doctor`; where that cannot be written, nothing is kept."""
    if folder is None:
        return
    document = {"format": _FORMAT, "version": _VERSION, **asdict(symptom)}
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def forget(folder: Path | None) -> None:
    """A start went well: what was remembered is past."""
    if folder is not None:
        with suppress(OSError):
            (folder / _FILE).unlink(missing_ok=True)


def probes_made(folder: Path | None) -> int:
    """How many answers of a pin probe are remembered in a folder."""
    if folder is None:
        return 0
    try:
        return sum(1 for _ in folder.glob("pins-*.json"))
    except OSError:
        return 0


def recall(folder: Path | None) -> Symptom | None:
    """The last start's refusal; None without one, or where the file is not one of ours."""
    if folder is None:
        return None
    try:
        found: Any = json.loads((folder / _FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (
        _FORMAT,
        _VERSION,
    ):
        return None
    values: dict[str, Any] = {name: found.get(name) for name in (*_TEXTS, *_SIZES)}
    if not all(isinstance(values[name], str) for name in _TEXTS):
        return None
    if not all(type(values[name]) is int for name in _SIZES):
        return None
    return Symptom(**values)
