"""Linux facts from folders that play other machines."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from strata_core.machine import Adapter, HugePages
from strata_core.machine.linux import read_linux

UNAME = platform.uname()._replace(system="Linux", release="5.0-uname", machine="AMD64")
GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    """lay(path=text, ...) is `root.lay`: write files below a folder that plays `/`."""

    class Root:
        path = tmp_path / "root"

        def lay(self, files: dict[str, str]) -> None:
            for name, text in files.items():
                file = self.path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")

        def read(self):
            return read_linux(self.path, UNAME)

    Root.path.mkdir()
    return Root()


def cpuinfo(*cores: tuple[int, int], more: str = "") -> str:
    blocks = [
        f"processor\t: {number}\nmodel name\t: Example 9000\nphysical id\t: {package}\n"
        f"core id\t\t: {core}\nflags\t\t: fpu avx2 avx\n{more}"
        for number, (package, core) in enumerate(cores)
    ]
    return "\n".join(blocks)


def test_a_workstation(root):
    root.lay(
        {
            "proc/sys/kernel/osrelease": "6.8.0-generic\n",
            "proc/cpuinfo": cpuinfo((0, 0), (0, 0), (0, 1), (0, 1)),
            "proc/self/status": "Name:\tx\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-3\n",
            "proc/self/limits": "Max locked memory         8388608    16777216    bytes\n",
            "proc/meminfo": (
                "MemTotal:       65536000 kB\nMemFree: 1 kB\nMemAvailable:   32768000 kB\n"
                "HugePages_Total:      10\nHugePages_Free:        4\nHugepagesize:       2048 kB\n"
            ),
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "dev/kmsg": "",
            "sys/bus/pci/devices/0000:00:00.0/class": "0x060000\n",
            "sys/bus/pci/devices/0000:00:00.0/vendor": "0x1022\n",
            "sys/bus/pci/devices/0000:00:00.0/device": "0x1450\n",
            "sys/bus/pci/devices/0000:65:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:65:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:65:00.0/device": "0x2335\n",
            "sys/bus/pci/devices/0000:0a:00.0/class": "0x120000\n",
            "sys/bus/pci/devices/0000:0a:00.0/vendor": "0x1002\n",
            "sys/bus/pci/devices/0000:0a:00.0/device": "0x74A1\n",
        }
    )
    machine = root.read()
    assert (machine.os, machine.release, machine.architecture) == (
        "linux",
        "6.8.0-generic",
        "x86_64",
    )
    assert (machine.cpu_model, machine.cpu_flags) == ("Example 9000", ("avx", "avx2", "fpu"))
    assert (machine.logical_cores, machine.physical_cores) == (4, 2)
    assert machine.ram_installed == machine.memory_installed == 65536000 * 1024
    assert machine.ram_available == machine.memory_available == 32768000 * 1024
    assert machine.memlock_limit == 8388608
    assert machine.huge_pages == HugePages(2 << 20, 10, 4, "madvise")
    assert machine.adapters == (
        Adapter("0x1002", "0x74a1", "0000:0a:00.0"),
        Adapter("0x10de", "0x2335", "0000:65:00.0"),
    )
    assert machine.kernel_log is True
    assert (machine.wsl, machine.container, machine.cpu_quota) == (None, (), None)


def test_an_empty_root_gives_what_is_left(root):
    machine = root.read()
    assert machine.release == "5.0-uname"
    assert machine.adapters is None
    assert machine.huge_pages is None
    assert machine.kernel_log is False
    assert machine.cgroup_memory_limit is None
    assert min(machine.logical_cores, machine.physical_cores, machine.ram_installed) >= 1


@pytest.mark.parametrize(
    ("allowed", "logical", "physical"),
    [("0-3", 4, 2), ("0,2", 2, 2), ("0-1", 2, 1), ("3", 1, 1), ("nonsense", 4, 2)],
)
def test_affinity_narrows_the_cores(root, allowed, logical, physical):
    root.lay(
        {
            "proc/cpuinfo": cpuinfo((0, 0), (0, 0), (1, 0), (1, 0)),
            "proc/self/status": f"Cpus_allowed_list:\t{allowed}\n",
        }
    )
    machine = root.read()
    assert (machine.logical_cores, machine.physical_cores) == (logical, physical)


def test_the_topology_of_sysfs_goes_before_cpuinfo(root):
    root.lay({"proc/cpuinfo": cpuinfo((0, 0), (0, 1), (0, 2), (0, 3))})
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        name = "core_cpus_list" if cpu % 2 else "thread_siblings_list"
        root.lay({f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": siblings})
    assert root.read().physical_cores == 2


def test_arm_processors_have_features_and_no_core_ids(root):
    root.lay({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd\n\nprocessor\t: 1\n"})
    machine = root.read()
    assert machine.cpu_flags == ("asimd", "fp")
    assert (machine.logical_cores, machine.physical_cores) == (2, 2)


@pytest.mark.parametrize(
    ("release", "files", "wsl"),
    [
        ("6.8.0-generic", [], None),
        ("4.4.0-19041-Microsoft", [], 1),
        ("5.15.153.1-microsoft-standard-WSL2", [], 2),
        ("4.19.104-microsoft-standard", [], 2),
        ("6.6.0-my-own", ["proc/sys/fs/binfmt_misc/WSLInterop"], 2),
        ("6.6.0-my-own", ["proc/sys/fs/binfmt_misc/WSLInterop-late"], 2),
        ("6.6.0-my-own", ["dev/dxg"], None),
    ],
)
def test_wsl(root, release, files, wsl):
    root.lay({"proc/sys/kernel/osrelease": release, **dict.fromkeys(files, "")})
    assert root.read().wsl == wsl


@pytest.mark.parametrize(
    ("files", "signs"),
    [
        ({".dockerenv": ""}, ("docker",)),
        ({"run/.containerenv": ""}, ("podman",)),
        ({"run/systemd/container": "systemd-nspawn\n"}, ("systemd-nspawn",)),
        ({"proc/self/cgroup": "0::/kubepods/pod1\n"}, ("kubernetes",)),
        ({".dockerenv": "", "proc/self/cgroup": "3:cpu:/docker/ab\n"}, ("docker",)),
    ],
)
def test_container_signs(root, files, signs):
    root.lay(files)
    assert root.read().container == signs


def test_a_capability_lifts_the_lock_limit(root):
    limits = "Max locked memory         65536    65536    bytes\n"
    root.lay({"proc/self/limits": limits, "proc/self/status": "CapEff:\t0000000000004000\n"})
    assert root.read().memlock_limit is None


def test_no_lock_limit(root):
    root.lay({"proc/self/limits": "Max locked memory         unlimited  unlimited  bytes\n"})
    assert root.read().memlock_limit is None


V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n"
)


def memory(installed: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {installed >> 10} kB\nMemAvailable: {installed >> 10} kB\n"}


def test_cgroup_v2_counts_every_ancestor(root):
    folder = "sys/fs/cgroup/outer/inner"
    root.lay(
        {
            **memory(64 * GIB),
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{folder}/memory.max": f"{16 * GIB}\n",
            f"{folder}/memory.current": f"{3 * GIB}\n",
            f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
            f"{folder}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": f"{32 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{31 * GIB}\n",
            "sys/fs/cgroup/outer/cpu.max": "250000 100000\n",
        }
    )
    machine = root.read()
    assert machine.cgroup_memory_limit == machine.memory_installed == 16 * GIB
    assert machine.cgroup_memory_room == machine.memory_available == 1 * GIB
    assert machine.cpu_quota == 2.5


def test_cgroup_v2_without_limits(root):
    root.lay(
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "max\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        }
    )
    machine = root.read()
    assert (machine.cgroup_memory_limit, machine.cgroup_memory_room) == (None, None)
    assert machine.cpu_quota is None


def test_cgroup_v1(root):
    root.lay(
        {
            **memory(64 * GIB),
            "proc/self/mountinfo": V1_MOUNTS,
            "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{9 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {4 * GIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        }
    )
    machine = root.read()
    assert machine.cgroup_memory_limit == 8 * GIB
    assert machine.cgroup_memory_room == 3 * GIB
    assert machine.cpu_quota == 1.5


@pytest.mark.parametrize(
    ("mount", "path"),
    [
        ("31 23 0:28 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "/docker/ab"),
        ("31 23 0:28 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "/elsewhere"),
        (V2_MOUNT, "/../../outside"),
        ("31 23 0:28 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n", "/"),
    ],
)
def test_a_cgroup_outside_the_view_counts_at_the_mount(root, mount, path):
    point = "sys/fs/c group" if "040" in mount else "sys/fs/cgroup"
    root.lay(
        {
            **memory(64 * GIB),
            "proc/self/mountinfo": mount,
            "proc/self/cgroup": f"0::{path}\n",
            f"{point}/memory.max": f"{5 * GIB}",
            f"{point}/memory.current": f"{6 * GIB}",
        }
    )
    machine = root.read()
    assert machine.cgroup_memory_limit == 5 * GIB
    assert machine.cgroup_memory_room == 0


def test_torn_files_are_facts_not_known(root):
    root.lay(
        {
            "proc/self/mountinfo": "garbage\n1 2 - x\n" + V2_MOUNT,
            "proc/self/cgroup": "no colons\n0::\n",
            "proc/meminfo": "MemTotal: much kB\nHugepagesize: 2048 kB\n",
            "proc/cpuinfo": "processor\nprocessor\t: two\n",
            "proc/self/status": "CapEff:\tnot hexadecimal\n",
            "sys/fs/cgroup/memory.max": "lots\n",
            "sys/fs/cgroup/cpu.max": "\n",
            "sys/bus/pci/devices/0000:00:00.0/class": "display\n",
        }
    )
    machine = root.read()
    assert machine.adapters == ()
    assert machine.cgroup_memory_limit is None
    assert machine.huge_pages == HugePages(2 << 20, 0, 0, "")
    assert machine.ram_installed > 0


@pytest.mark.skipif(platform.system() != "Linux", reason="reads this machine's own /proc")
def test_this_machine_agrees_with_the_kernel():
    import os

    machine = read_linux(Path("/"), platform.uname())
    assert machine.logical_cores == len(os.sched_getaffinity(0))
    assert 1 <= machine.physical_cores <= machine.logical_cores
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.ram_installed == pages
    assert 0 < machine.memory_available <= machine.memory_installed <= pages
    assert machine.page_size == os.sysconf("SC_PAGE_SIZE")
