"""What the kernel logged about a driver that could pin no more memory.

Under WSL 2 the driver pins and maps host memory through the virtual machine's host, which grants
little of it. When that runs out, the kernel logs a line with "establish_gpadl failed: -122" (-122
is EDQUOT), and whatever needs such memory next fails with a plain "out of memory".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from strata_core.machine.record import Machine

SIGNATURE = re.compile(r"establish_gpadl failed: -122")
"""The part of the line that tells; what stands before it differs between kernels."""

KEY = "kernel_log:refused_pins"
_DEVICE = "/dev/kmsg"
_RECORD = 8192  # the kernel gives one record a read, of at most this size
_MOST_RECORDS = 1 << 17
_SECONDS = 5.0
_COMMANDS = (
    ("dmesg",),
    ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat", "-g", "establish_gpadl"),
)


@frozen
class RefusedPins:
    """Lines of the kernel's log that say the driver could pin no more.

    `readable` is False where the log could not be read at all; `count` counts the lines, `last` is
    the newest.
    """

    readable: bool
    count: int = 0
    last: str = ""


def refused_pins(machine: Machine) -> RefusedPins:
    """What the kernel's log says; asked once a machine, and part of its recorded facts."""
    found = machine.observe(KEY, _ask)
    if not isinstance(found, dict):
        return RefusedPins(readable=False)
    return RefusedPins(
        readable=bool(found.get("readable")),
        count=int(found.get("count", 0)),
        last=str(found.get("last", "")),
    )


def matching(lines: Sequence[str]) -> RefusedPins:
    """What these lines of a readable log say."""
    hits = [line for line in lines if SIGNATURE.search(line)]
    return RefusedPins(True, len(hits), hits[-1] if hits else "")


def _ask() -> dict[str, Any]:
    for read in (_from_device, *(_from(command) for command in _COMMANDS)):
        lines = read()
        if lines is not None:
            found = matching(lines)
            return {"readable": True, "count": found.count, "last": found.last}
    return {"readable": False}


def _from_device(path: str = _DEVICE) -> list[str] | None:
    """Every record that the kernel still has; None where they may not be read.

    A record is "priority,number,time,flags;text" (Linux Documentation/ABI/testing/dev-kmsg).
    """
    if sys.platform != "linux":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(descriptor, _RECORD)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # this record was overwritten; the next read gives the oldest there is
            except OSError:
                return None
            if not record:
                break
            text = record.decode("utf-8", "replace")
            lines.append(text.split("\n", 1)[0].partition(";")[2])
    finally:
        os.close(descriptor)
    return lines


def _from(command: Sequence[str]) -> Callable[[], list[str] | None]:
    """A reader by way of a command; it gives None where that is missing or may not read."""

    def read() -> list[str] | None:
        if sys.platform != "linux" or not _installed(command[0]):
            return None
        try:
            done = subprocess.run(  # noqa: S603 - one of _COMMANDS
                command,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        text = done.stdout.decode("utf-8", "replace")
        # journalctl ends with 1 where nothing matches, and prints why it may not read on stderr.
        if done.stderr or (done.returncode and command[0] != "journalctl"):
            return None
        return text.splitlines()

    return read


def _installed(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in ("/usr/bin", "/bin", "/usr/sbin"))
