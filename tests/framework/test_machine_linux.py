"""Linux machines laid out below a folder: cores, memory, WSL, containers, adapters, limits."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from strata_core.machine import Adapter, HugePages, read_machine
from strata_core.machine.linux import read_linux

UNAME = platform.uname_result("Linux", "host", "6.8.0-45-generic", "#45", "x86_64")

CPUINFO = "".join(
    f"processor\t: {cpu}\nvendor_id\t: Maker\nmodel name\t: A 4-core processor\n"
    f"physical id\t: 0\ncore id\t\t: {cpu % 4}\nflags\t\t: fpu sse4_2 avx2 avx\n\n"
    for cpu in range(8)
)
MEMINFO = """MemTotal:       65536000 kB
MemFree:         1000000 kB
MemAvailable:   50000000 kB
HugePages_Total:      16
HugePages_Free:       12
Hugepagesize:       2048 kB
"""
STATUS = "Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         8388608              16777216             bytes
"""
PLAIN = {
    "proc/cpuinfo": CPUINFO,
    "proc/meminfo": MEMINFO,
    "proc/self/status": STATUS,
    "proc/self/limits": LIMITS,
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
}


def lay_out(root: Path, files: dict[str, str | None]) -> Path:
    """Write `files` over the plain PC's; None leaves one out."""
    for name, text in {**PLAIN, **files}.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    return root


def read(root: Path, files: dict[str, str | None] | None = None):
    return read_linux(lay_out(root, files or {}), UNAME)


def test_a_plain_pc(tmp_path):
    machine = read(
        tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}
    )
    assert (machine.os, machine.release, machine.architecture) == (
        "linux",
        "6.8.0-45-generic",
        "x86_64",
    )
    assert (machine.logical_cores, machine.physical_cores) == (8, 4)
    assert machine.cpu_model == "A 4-core processor"
    assert machine.cpu_flags == ("avx", "avx2", "fpu", "sse4_2")
    assert machine.ram_installed == 65536000 * 1024
    assert machine.ram_available == 50000000 * 1024
    assert machine.memlock_limit == 8388608
    assert machine.huge_pages == HugePages(2 << 20, 16, 12, "madvise")
    assert (machine.wsl, machine.container, machine.kernel_log) == (None, (), False)
    assert machine.adapters is None
    assert (machine.cpu_quota, machine.cgroup_memory_limit) == (None, None)


def test_only_cores_that_this_process_may_use_count(tmp_path):
    machine = read(tmp_path, {"proc/self/status": STATUS.replace("0-7", "0,4,2-3")})
    assert (machine.logical_cores, machine.physical_cores) == (4, 3)


def test_the_topology_of_sys_tells_siblings(tmp_path):
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{cpu & ~1}-{cpu | 1}\n"
        for cpu in range(8)
    }
    plain = "".join(f"processor\t: {cpu}\n\n" for cpu in range(8))
    assert read(tmp_path, {"proc/cpuinfo": plain, **topology}).physical_cores == 4


def test_processors_that_name_no_core_count_alone(tmp_path):
    arm = "".join(f"processor\t: {cpu}\nFeatures\t: fp asimd sve\n\n" for cpu in range(8))
    machine = read(tmp_path, {"proc/cpuinfo": arm + "Hardware\t: A board\n"})
    assert (machine.logical_cores, machine.physical_cores) == (8, 8)
    assert machine.cpu_flags == ("asimd", "fp", "sve")


def test_an_old_kernel_has_no_memavailable(tmp_path):
    text = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\n"
    machine = read(tmp_path, {"proc/meminfo": text})
    assert machine.ram_available == 1000000 * 1024
    assert machine.huge_pages is None


@pytest.mark.parametrize("bad", ["", "nonsense", "MemTotal: many kB\nHugepagesize:\nA\n:\n"])
def test_facts_that_cannot_be_read_do_not_fail(tmp_path, bad):
    machine = read(tmp_path, dict.fromkeys(PLAIN, bad))
    assert machine.logical_cores == os.cpu_count()
    assert machine.ram_installed > 0
    assert (machine.memlock_limit, machine.huge_pages, machine.cpu_flags) == (None, None, ())


def test_an_empty_root_gives_what_uname_says(tmp_path):
    machine = read_linux(tmp_path, UNAME)
    assert (machine.release, machine.adapters) == ("6.8.0-45-generic", None)


@pytest.mark.parametrize(
    ("status", "limits", "expected"),
    [
        (STATUS, LIMITS.replace("8388608 ", "unlimited"), None),
        (STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000004000"), LIMITS, None),
        (STATUS.replace("CapEff:\t0000000000000000", "CapEff:\tffffffffffffbfff"), LIMITS, 8388608),
        (STATUS.replace("CapEff:\t0000000000000000", "CapEff:\tzz"), LIMITS, 8388608),
    ],
    ids=["unlimited", "capable", "all others", "unreadable"],
)
def test_the_lock_limit_holds_unless_the_process_may_lock_anything(
    tmp_path, status, limits, expected
):
    files = {"proc/self/status": status, "proc/self/limits": limits}
    assert read(tmp_path, files).memlock_limit == expected


@pytest.mark.parametrize(
    ("release", "more", "expected"),
    [
        ("4.4.0-19041-Microsoft", {}, 1),
        ("4.4.0-19041-Microsoft", {"proc/sys/fs/binfmt_misc/WSLInterop": "enabled"}, 1),
        ("3.4.0-Microsoft", {}, 1),
        ("4.19.43-microsoft-standard", {"dev/dxg": ""}, 2),
        ("5.15.167.4-microsoft-standard-WSL2", {}, 2),
        ("6.6.9-home-made", {"proc/sys/fs/binfmt_misc/WSLInterop-late": "enabled"}, 2),
        ("6.6.9-home-made", {"proc/sys/fs/binfmt_misc/WSLInterop": "enabled"}, 2),
        ("6.8.0-45-generic", {}, None),
        ("4.4.0-210-generic", {}, None),
    ],
)
def test_wsl_and_its_version(tmp_path, release, more, expected):
    machine = read(tmp_path, {"proc/sys/kernel/osrelease": release + "\n", **more})
    assert (machine.wsl, machine.release) == (expected, release)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({".dockerenv": ""}, ("docker",)),
        ({"run/.containerenv": ""}, ("podman",)),
        ({"run/secrets/kubernetes.io/token": "x"}, ("kubernetes",)),
        ({"run/systemd/container": "systemd-nspawn\n"}, ("systemd-nspawn",)),
        ({"proc/self/cgroup": "5:cpu:/docker/0123abcd\n"}, ("docker",)),
        ({"proc/self/cgroup": "0::/kubepods/pod1/2\n", ".dockerenv": ""}, ("docker", "kubernetes")),
        ({"proc/self/cgroup": "0::/lxc/box\n"}, ("lxc",)),
        ({"proc/self/cgroup": "0::/user.slice\n"}, ()),
    ],
)
def test_signs_of_a_container(tmp_path, files, expected):
    assert read(tmp_path, files).container == expected


def device(address: str, code: str, vendor: str, model: str) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{address}"
    return {f"{folder}/class": code, f"{folder}/vendor": vendor, f"{folder}/device": model}


def test_display_adapters_and_accelerators_are_found_by_class(tmp_path):
    machine = read(
        tmp_path,
        {
            **device("0000:65:00.0", "0x030000\n", "0x10AB\n", "0x2684\n"),
            **device("0000:17:00.0", "0x030200\n", "0x10ab\n", "0x2330\n"),
            **device("0000:c1:00.0", "0x120000\n", "0x1002\n", "0x74a1\n"),
            **device("0000:00:1f.3", "0x040300\n", "0x8086\n", "0x7ad0\n"),
            **device("0000:00:02.0", "torn\n", "0x8086\n", "0x7ad0\n"),
        },
    )
    assert machine.adapters == (
        Adapter("0x10ab", "0x2330", "0000:17:00.0"),
        Adapter("0x10ab", "0x2684", "0000:65:00.0"),
        Adapter("0x1002", "0x74a1", "0000:c1:00.0"),
    )


def test_no_adapter_and_no_pci_differ(tmp_path):
    assert read(tmp_path / "a").adapters is None
    (tmp_path / "b/sys/bus/pci/devices").mkdir(parents=True)
    assert read(tmp_path / "b").adapters == ()


def test_the_kernel_log_counts_if_it_opens(tmp_path):
    assert read(tmp_path / "a", {"dev/kmsg": ""}).kernel_log
    assert not read(tmp_path / "b").kernel_log


@pytest.mark.skipif(sys.platform != "linux", reason="compares with this Linux")
def test_this_computer_agrees_with_other_sources():
    machine = read_machine()
    affinity = os.sched_getaffinity(0)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.logical_cores == len(affinity)
    assert 1 <= machine.physical_cores <= len(affinity)
    assert machine.ram_installed == pytest.approx(installed, rel=0.01)
    assert 0 < machine.ram_available <= machine.ram_installed
    assert machine.page_size == os.sysconf("SC_PAGE_SIZE")
    assert machine.release == platform.release()
    assert machine.python == f"{platform.python_implementation()} {platform.python_version()}"
