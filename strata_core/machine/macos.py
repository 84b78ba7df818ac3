"""A macOS machine's facts, asked of sysctl(8) and vm_stat(1)."""

from __future__ import annotations

import mmap
import os
import platform
import re
import subprocess
from collections.abc import Callable

from strata_core.machine.linux import architecture
from strata_core.machine.record import Machine

Ask = Callable[[list[str]], str]

_NAMES = (
    "hw.memsize",
    "hw.physicalcpu",
    "hw.logicalcpu",
    "machdep.cpu.brand_string",
    "machdep.cpu.features",
    "machdep.cpu.leaf7_features",
)
_DROPPABLE = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")


def run(command: list[str]) -> str:
    """What a system command prints; "" where it fails, or hangs for twenty seconds."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands of this file
            command, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def read_macos(ask: Ask = run) -> Machine:
    """The facts that macOS gives; `ask` runs a command and returns its output."""
    told = dict(_pairs(ask(["/usr/sbin/sysctl", *_NAMES])))
    cores = os.cpu_count() or 1
    installed = _number(told.get("hw.memsize", "")) or mmap.PAGESIZE
    flags = f"{told.get('machdep.cpu.features', '')} {told.get('machdep.cpu.leaf7_features', '')}"
    flags = flags.lower().replace("avx1.0", "avx").replace(".", "_")  # SSE4.2 is sse4_2 on Linux
    return Machine(
        os="macos",
        release=platform.release(),
        architecture=architecture(platform.machine()),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        logical_cores=_number(told.get("hw.logicalcpu", "")) or cores,
        physical_cores=_number(told.get("hw.physicalcpu", "")) or cores,
        ram_installed=installed,
        ram_available=min(_available(ask(["/usr/bin/vm_stat"])), installed),
        page_size=mmap.PAGESIZE,
        cpu_model=told.get("machdep.cpu.brand_string", ""),
        cpu_flags=tuple(sorted(set(flags.split()))),
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in lines]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _available(text: str) -> int:
    """Bytes that macOS can hand out without paging, from vm_stat's counts of pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    counts = dict(_pairs(text))
    pages = sum(_number(counts.get(name, "").rstrip(".")) for name in _DROPPABLE)
    return pages * (int(size[1]) if size else mmap.PAGESIZE)
