"""What the machine is and gives: device memory in use, the device's name, and bandwidths."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

RATES = Path(__file__).with_name("rates.py")
STEP = 0.2
"""Seconds between two looks at the memory in use."""


def nvml() -> Callable[[], int] | None:
    """Bytes in use of the first NVIDIA device, asked of the driver; None where it cannot be."""
    try:
        import pynvml

        pynvml.nvmlInit()
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # noqa: BLE001 - no module, no driver, no device: all mean "not known"
        return _by_program()
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(first).used)


def _by_program() -> Callable[[], int] | None:
    def used() -> int:
        command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used"]
        command += ["--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0]) << 20

    try:
        used()
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None
    return used


class Meter:
    """Device memory in use; a device that nothing tells of has none to tell."""

    def __init__(self, used: Callable[[], int] | None) -> None:
        self._used = used

    def now(self) -> int | None:
        """Bytes in use by everybody; None: not known."""
        return None if self._used is None else self._used()

    @contextmanager
    def most(self) -> Iterator[list[int]]:
        """A list of one number afterwards: the most that was in use meanwhile; else empty."""
        found: list[int] = []
        if self._used is None:
            yield found
            return
        over, seen = Event(), [self._used()]
        used = self._used

        def look() -> None:
            while not over.wait(STEP):
                seen.append(used())

        watching = Thread(target=look, daemon=True)
        watching.start()
        try:
            yield found
        finally:
            over.set()
            watching.join()
            found.append(max(seen))


def rates(backend: str, environment: dict[str, str]) -> dict[str, Any] | None:
    """Bandwidths, by a process of its own; None with the reason on the terminal."""
    command = [sys.executable, str(RATES), "host" if backend in ("cpu", "sim") else "device"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(f"bandwidths were not measured: {done.stderr.strip()[-400:]}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"bandwidths in {time.monotonic() - began:.1f} s: {found}", flush=True)
    return found


def facts(backend: str, found: dict[str, Any] | None) -> dict[str, Any]:
    """An entry of the state's machines."""
    from strata_core.machine import read_machine

    name, driver = backend, "none"
    command = ["nvidia-smi", "-i", "0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if backend not in ("cpu", "sim"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            name, driver = (part.strip() for part in done.stdout.split(",")[:2])
        except (OSError, ValueError, subprocess.CalledProcessError):
            driver = "not known"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "driver": driver,
        "rates": found,
        "facts": read_machine().to_json(),
        "command": sys.argv,
    }
