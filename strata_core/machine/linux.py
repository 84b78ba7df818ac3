"""A Linux machine's facts, read from /proc, /sys and /dev below a root folder."""

from __future__ import annotations

import mmap
import os
import platform
import re
from pathlib import Path

from strata_core.machine.cgroup import read_cgroup
from strata_core.machine.fields import Adapter, HugePages
from strata_core.machine.record import Machine

_DISPLAY, _PROCESSING_ACCELERATOR = 0x03, 0x12  # base classes of the PCI code assignment
_CAP_IPC_LOCK = 14  # linux/capability.h: its holder is not held to RLIMIT_MEMLOCK
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


def read_linux(root: Path, uname: platform.uname_result) -> Machine:
    """The facts below `root`; `uname` gives the release where /proc has none."""
    proc = root / "proc"
    status = _table(proc / "self/status")
    memory = _table(proc / "meminfo")
    processors = _processors(proc / "cpuinfo")
    usable = _cpu_list(status.get("Cpus_allowed_list", "")) or sorted(processors)
    first = processors[min(processors)] if processors else {}
    cgroup = read_cgroup(root)
    release = read_text(proc / "sys/kernel/osrelease") or uname.release
    installed = _kib(memory, "MemTotal")
    return Machine(
        os=uname.system.lower(),
        release=release,
        architecture=architecture(uname.machine),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        logical_cores=len(usable) or os.cpu_count() or 1,
        physical_cores=_physical_cores(root, usable, processors) or os.cpu_count() or 1,
        ram_installed=installed or _pages("SC_PHYS_PAGES"),
        ram_available=_kib(memory, "MemAvailable") or _kib(memory, "MemFree"),
        page_size=mmap.PAGESIZE,
        wsl=_wsl(root, release),
        container=_container(root),
        cpu_model=first.get("model name") or first.get("Model") or first.get("Hardware", ""),
        cpu_flags=tuple(sorted(set((first.get("flags") or first.get("Features", "")).split()))),
        cpu_quota=cgroup.cpu_quota,
        cgroup_memory_limit=cgroup.memory_limit,
        cgroup_memory_room=cgroup.memory_room,
        memlock_limit=_memlock(proc, status),
        huge_pages=_huge_pages(root, memory),
        adapters=_adapters(root / "sys/bus/pci/devices"),
        kernel_log=_readable(root / "dev/kmsg"),
    )


def architecture(word: str) -> str:
    """One name per architecture, whatever the system calls it."""
    return _ARCHITECTURES.get(word.lower(), word.lower())


def read_text(path: Path) -> str:
    """A small file's text without surrounding blanks; "" where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _table(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in read_text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kib(memory: dict[str, str], name: str) -> int:
    number = memory.get(name, "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() else 0


def _pages(name: str) -> int:
    try:
        return max(os.sysconf(name), 1) * mmap.PAGESIZE
    except (AttributeError, OSError, ValueError):
        return mmap.PAGESIZE


def _processors(path: Path) -> dict[int, dict[str, str]]:
    """The blocks of /proc/cpuinfo by processor number; a block's last line of a name counts."""
    found: dict[int, dict[str, str]] = {}
    for block in re.split(r"\n\s*\n", read_text(path)):
        table = {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in block.splitlines())
        }
        if table.get("processor", "").isdecimal():
            found[int(table["processor"])] = table
    return found


def _cpu_list(text: str) -> list[int]:
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return []
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _physical_cores(root: Path, usable: list[int], processors: dict[int, dict[str, str]]) -> int:
    """Distinct cores among the usable processors; processors that name no core count alone."""
    cores = set()
    for cpu in usable:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read_text(topology / "core_cpus_list")
        siblings = siblings or read_text(topology / "thread_siblings_list")
        block = processors.get(cpu, {})
        if not siblings and "core id" in block:
            siblings = f"{block.get('physical id', '')}:{block['core id']}"
        cores.add(siblings or f"cpu {cpu}")
    return len(cores)


def _wsl(root: Path, release: str) -> int | None:
    """WSL 1 answers with a Windows build's 4.4 release; WSL 2 runs a kernel, maybe the user's own.

    A kernel of the user's own need not say "microsoft"; the interop handler gives it away.
    """
    word = release.lower()
    if "microsoft" in word:
        old = "wsl2" not in word and word.startswith(("3.", "4.4.")) and "standard" not in word
        return 1 if old and not (root / "dev/dxg").exists() else 2
    handlers = root / "proc/sys/fs/binfmt_misc"
    interop = any((handlers / name).exists() for name in ("WSLInterop", "WSLInterop-late"))
    return 2 if interop else None


def _container(root: Path) -> tuple[str, ...]:
    signs = {
        "docker": ".dockerenv",
        "podman": "run/.containerenv",
        "kubernetes": "run/secrets/kubernetes.io",
    }
    found = {name for name, path in signs.items() if (root / path).exists()}
    manager = read_text(root / "run/systemd/container")
    if manager:
        found.add(manager)
    groups = read_text(root / "proc/self/cgroup")
    for word, name in (("/docker", "docker"), ("/kubepods", "kubernetes"), ("/lxc", "lxc")):
        if word in groups:
            found.add(name)
    return tuple(sorted(found))


def _memlock(proc: Path, status: dict[str, str]) -> int | None:
    try:
        capabilities = int(status.get("CapEff", "0"), 16)
    except ValueError:
        capabilities = 0
    if capabilities >> _CAP_IPC_LOCK & 1:
        return None
    limit = re.search(r"^Max locked memory\s+(\d+)\s", read_text(proc / "self/limits"), re.M)
    return int(limit[1]) if limit else None


def _huge_pages(root: Path, memory: dict[str, str]) -> HugePages | None:
    size = _kib(memory, "Hugepagesize")
    if not size:
        return None
    chosen = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    word = re.search(r"\[(\w+)\]", chosen)
    counts = [memory.get(name, "") for name in ("HugePages_Total", "HugePages_Free")]
    total, free = (int(count) if count.isdecimal() else 0 for count in counts)
    return HugePages(size, total, free, word[1] if word else "")


def _adapters(devices: Path) -> tuple[Adapter, ...] | None:
    try:
        folders = sorted(devices.iterdir())
    except OSError:
        return None
    found = []
    for folder in folders:
        ids = [read_text(folder / name) for name in ("class", "vendor", "device")]
        if not all(re.fullmatch(r"0x[0-9a-fA-F]+", text) for text in ids):
            continue
        code, vendor, device = (int(text, 16) for text in ids)
        if code >> 16 in (_DISPLAY, _PROCESSING_ACCELERATOR):
            found.append(Adapter(f"0x{vendor:04x}", f"0x{device:04x}", folder.name))
    return tuple(found)


def _readable(path: Path) -> bool:
    """Opening is the test: the kernel refuses here where only root may read its log."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    os.close(descriptor)
    return True
