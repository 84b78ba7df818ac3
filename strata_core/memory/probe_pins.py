"""How much host memory a driver page-locks in all, found by asking for it in steps.

Some drivers pin about 1 GiB whatever is free, others half of the RAM, and none says so. The probe
asks for one piece after another until the first refusal, and frees everything again. Its answer is
kept in a file per driver, system and devices, because it takes time and disturbs others meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from strata_core.config import cache_folder
from strata_core.errors import Degradation, DeviceError, Refused
from strata_core.machine import Machine
from strata_core.runtime import Runtime

STEP = 64 << 20
"""Bytes of one piece: the answer is at most this much too small."""

MOST = 8 << 30
"""Bytes after which the probe ends: a driver that grants so much is taken to have no limit."""

FORMAT, VERSION = "strata-pin-probe", 1


@frozen
class PinProbe:
    """`nbytes` were page-locked at once; `refused` tells whether the driver ended it.

    Where it did not, `nbytes` is no limit, only what was tried.
    """

    nbytes: int
    refused: bool

    @property
    def limit(self) -> int | None:
        """The limit that was found, None where none was."""
        return self.nbytes if self.refused else None


@frozen
class PinKey:
    """What an answer holds for: the driver's version, the system, the devices, and its RAM."""

    driver: str
    system: str
    devices: tuple[str, ...]
    ram: int

    @classmethod
    def of(
        cls, runtime: Runtime, machine: Machine, driver: str, used: Collection[int] | None = None
    ) -> PinKey:
        """The key of this machine; `driver` is what its plugin knows the driver's version as.

        `used` are the devices whose contexts are open (None: all): contexts take of what a driver
        page-locks, so an answer with one is none for three.
        """
        kind = f" wsl{machine.wsl}" if machine.wsl else ""
        return cls(
            driver,
            f"{machine.os}{kind} {machine.release}",
            tuple(d.name for d in runtime.devices() if used is None or d.index in used),
            machine.ram_installed,
        )


def probe_pins(runtime: Runtime, *, step: int = STEP, most: int = MOST) -> PinProbe:
    """Page-lock pieces of `step` bytes up to `most` or the first refusal, and free them again.

    A context must be open. What others page-locked before is not part of the answer. Raises
    DeviceError where the driver fails otherwise than by refusing memory, or keeps a piece.
    """
    held: list[int] = []
    refused = False
    try:
        while not refused and (len(held) + 1) * step <= most:
            try:
                held.append(runtime.host_alloc(step))
            except Refused:
                runtime.take_error()
                refused = True
        return PinProbe(len(held) * step, refused)
    finally:
        _free(runtime, held)


def pin_limit(
    runtime: Runtime,
    key: PinKey,
    options: Mapping[str, Any],
    degrade: Callable[[Degradation], None],
    *,
    step: int = STEP,
    most: int = MOST,
) -> int | None:
    """What the driver page-locks in all: given, remembered, or probed now; None for no limit.

    `options` are the settings by key: `pin_limit_gib` takes the probe's place, `cache_dir` is where
    answers are kept. A file that is damaged, or is about another machine, is passed over.
    """
    given = options.get("pin_limit_gib")
    if given is not None:
        return int(given * 2**30)
    folder = options.get("cache_dir") or cache_folder()
    file = _file(folder, key) if folder else None
    probe = _remembered(file, key) if file else None
    if probe is None:
        probe = probe_pins(runtime, step=step, most=most)
        if file is not None:
            _remember(file, key, probe, degrade)
    return probe.limit


def _free(runtime: Runtime, held: list[int]) -> None:
    """Free every piece; once more where an error was pending. Raises the first that stays."""
    left: DeviceError | None = None
    for address in held:
        try:
            runtime.host_free(address)
        except DeviceError:
            runtime.take_error()
            try:
                runtime.host_free(address)
            except DeviceError as error:
                runtime.take_error()
                left = left or error
    if left is not None:
        raise left


# --- what is remembered ------------------------------------------------------------------------


def _file(folder: str | os.PathLike[str], key: PinKey) -> Path:
    named = json.dumps(asdict(key), sort_keys=True)
    return Path(folder) / f"pins-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def _plain(key: PinKey) -> dict[str, Any]:
    return {**asdict(key), "devices": list(key.devices)}


def _remembered(file: Path, key: PinKey) -> PinProbe | None:
    """The answer in a file, None where there is none that could be this machine's."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    same = [found.get(name) for name in ("format", "version", "key")]
    if same != [FORMAT, VERSION, _plain(key)]:
        return None
    nbytes, refused = found.get("nbytes"), found.get("refused")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not isinstance(refused, bool):
        return None
    return PinProbe(nbytes, refused) if 0 <= nbytes <= key.ram else None


def _remember(
    file: Path, key: PinKey, probe: PinProbe, degrade: Callable[[Degradation], None]
) -> None:
    """Write an answer to a temporary name and rename it, so that readers see whole files."""
    document = {"format": FORMAT, "version": VERSION, "key": _plain(key), **asdict(probe)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(document, stream, indent=1)
            Path(temporary).replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        degrade(
            Degradation(
                what="how much memory the driver page-locks is not remembered",
                why=f"{file.parent} cannot be written: {error.strerror or error}",
                cost="every start finds it out again, which takes up to some seconds",
                remedy="make the folder writable, set another one with STRATA_CACHE_DIR, or give "
                "the amount with STRATA_PIN_LIMIT_GIB",
            )
        )
