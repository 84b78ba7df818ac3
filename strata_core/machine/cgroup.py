"""What cgroups grant this process: memory and CPU time, versions 1 and 2.

Sources: the kernel's admin guide, "Control Group v2" and "cgroup-v1/memory"; proc(5) for
/proc/self/cgroup and /proc/self/mountinfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from attrs import frozen

_UNLIMITED = 1 << 60  # version 1 writes the largest multiple of a page below 2^63


@frozen
class Cgroup:
    """Memory in bytes and CPU time in cores; None where nothing limits it."""

    memory_limit: int | None
    memory_room: int | None
    cpu_quota: float | None


@frozen
class _Mount:
    """A mounted hierarchy; `controllers` is empty for version 2."""

    controllers: frozenset[str]
    top: str
    point: str


def read_cgroup(root: Path) -> Cgroup:
    """Limits along the whole path of this process's cgroups: every ancestor's holds as well."""
    folders = list(_folders(root))
    limits, rooms, quotas = [], [], []
    for folder in folders:
        quotas += [quota for quota in (_quota_v1(folder), _quota_v2(folder)) if quota]
        for limit, used in (_memory_v1(folder), _memory_v2(folder)):
            if limit is not None and limit < _UNLIMITED:
                limits.append(limit)
                rooms.append(max(limit - used, 0))
    return Cgroup(min(limits, default=None), min(rooms, default=None), min(quotas, default=None))


def _folders(root: Path) -> Iterator[Path]:
    """This process's cgroup folders and their ancestors, in every hierarchy that matters."""
    mounts = list(_mounts(_read(root / "proc/self/mountinfo")))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = ([*line.split(":", 2), "", ""])[:3]
        controllers = frozenset(filter(None, names.split(",")))
        for mount in mounts:
            if mount.controllers & controllers or mount.controllers == controllers:
                yield from _chain(root, mount, path)


def _chain(root: Path, mount: _Mount, path: str) -> Iterator[Path]:
    """From the cgroup up to the mount; outside a namespace's or mount's view, the mount alone."""
    top = "" if mount.top == "/" else mount.top
    inside = (path == top or path.startswith(top + "/")) and ".." not in path
    steps = PurePosixPath(path[len(top) :].lstrip("/")) if inside else PurePosixPath()
    folder = root / mount.point.lstrip("/")
    yield folder
    for step in steps.parts:
        folder = folder / step
        yield folder


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 3 or right[0] not in ("cgroup", "cgroup2"):
            continue
        names = right[2].split(",") if right[0] == "cgroup" else []
        controllers = frozenset(names) & {"memory", "cpu", "cpuacct"}
        if right[0] == "cgroup2" or controllers:
            yield _Mount(controllers, _unescaped(left[3]), _unescaped(left[4]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _memory_v2(folder: Path) -> tuple[int | None, int]:
    limit = _number(_read(folder / "memory.max"))
    used = _number(_read(folder / "memory.current")) or 0
    return limit, max(used - _stat(folder, "inactive_file"), 0)


def _memory_v1(folder: Path) -> tuple[int | None, int]:
    limit = _number(_read(folder / "memory.limit_in_bytes"))
    used = _number(_read(folder / "memory.usage_in_bytes")) or 0
    return limit, max(used - _stat(folder, "total_inactive_file"), 0)


def _stat(folder: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", _read(folder / "memory.stat"), re.M)
    return int(found[1]) if found else 0


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _cores(_number(quota), _number(period))


def _quota_v1(folder: Path) -> float | None:
    quota = _number(_read(folder / "cpu.cfs_quota_us"))
    return _cores(quota, _number(_read(folder / "cpu.cfs_period_us")))


def _cores(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period else None


def _number(text: str) -> int | None:
    """A number, or None for "max", -1 and everything else that is no limit."""
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
