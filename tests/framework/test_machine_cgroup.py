"""Cgroups of both versions laid out below a folder: the tightest limit on the path holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.machine.cgroup import Cgroup, read_cgroup

GIB = 1 << 30
NOTHING = Cgroup(None, None, None)

MOUNT_2 = "30 23 0:26 {top} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_1 = "31 23 0:27 {top} {point} rw,nosuid - cgroup cgroup rw,{names}\n"
OTHER = "22 28 0:20 / /sys rw - sysfs sysfs rw\n23 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def version_2(root: Path, path: str, groups: dict[str, dict[str, str]], top: str = "/") -> Cgroup:
    files = {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": OTHER + MOUNT_2.format(top=top, point="/sys/fs/cgroup"),
    }
    for folder, values in groups.items():
        files |= {f"sys/fs/cgroup{folder}/{name}": text for name, text in values.items()}
    return read_cgroup(lay_out(root, files))


def version_1(root: Path, path: str, memory: dict[str, str], cpu: dict[str, str]) -> Cgroup:
    """`memory` and `cpu` are files by path below their hierarchies; cpu is mounted with cpuacct."""
    files = {
        "proc/self/cgroup": f"9:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n",
        "proc/self/mountinfo": OTHER
        + MOUNT_1.format(top="/", point="/sys/fs/cgroup/memory", names="memory")
        + MOUNT_1.format(top="/", point="/sys/fs/cgroup/cpu,cpuacct", names="cpu,cpuacct")
        + MOUNT_1.format(top="/", point="/sys/fs/cgroup/systemd", names="xattr,name=systemd"),
    }
    files |= {f"sys/fs/cgroup/memory/{name}": text for name, text in memory.items()}
    files |= {f"sys/fs/cgroup/cpu,cpuacct/{name}": text for name, text in cpu.items()}
    return read_cgroup(lay_out(root, files))


def test_no_cgroup_at_all(tmp_path):
    assert read_cgroup(tmp_path) == NOTHING


def test_version_2_without_limits(tmp_path):
    groups = {"/a": {"memory.max": "max\n", "cpu.max": "max 100000\n", "memory.current": "5\n"}}
    assert version_2(tmp_path, "/a", groups) == NOTHING


def test_version_2_counts_file_cache_that_can_go_as_free(tmp_path):
    group = {
        "memory.max": f"{8 * GIB}\n",
        "memory.current": f"{3 * GIB}\n",
        "memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\n",
        "cpu.max": "250000 100000\n",
    }
    assert version_2(tmp_path, "/a/b", {"/a/b": group}) == Cgroup(8 * GIB, 7 * GIB, 2.5)


def test_version_2_an_ancestor_limits_too(tmp_path):
    groups = {
        "": {"cpu.max": "800000 100000"},
        "/a": {"memory.max": f"{4 * GIB}", "memory.current": f"{1 * GIB}"},
        "/a/b": {
            "memory.max": f"{16 * GIB}",
            "memory.current": f"{14 * GIB}",
            "cpu.max": "1600000 100000",
        },
    }
    assert version_2(tmp_path, "/a/b", groups) == Cgroup(4 * GIB, 2 * GIB, 8.0)


def test_version_2_in_a_container_that_sees_its_own_group_as_the_top(tmp_path):
    groups = {"": {"memory.max": f"{2 * GIB}", "memory.current": f"{GIB}"}}
    assert version_2(tmp_path, "/", groups) == Cgroup(2 * GIB, GIB, None)


@pytest.mark.parametrize("path", ["/docker/12ab", "/../other", "/docker/12ab2/x"])
def test_version_2_mounted_from_elsewhere(tmp_path, path):
    groups = {"": {"memory.max": f"{2 * GIB}", "memory.current": "0"}}
    assert version_2(tmp_path, path, groups, top="/docker/12ab") == Cgroup(2 * GIB, 2 * GIB, None)


def test_version_2_below_a_mounted_part(tmp_path):
    groups = {"/inner": {"memory.max": f"{GIB}", "memory.current": "0"}}
    found = version_2(tmp_path, "/docker/12ab/inner", groups, top="/docker/12ab")
    assert found == Cgroup(GIB, GIB, None)


def test_a_used_up_group_has_no_room(tmp_path):
    group = {"memory.max": f"{GIB}", "memory.current": f"{GIB + 4096}"}
    assert version_2(tmp_path, "/a", {"/a": group}) == Cgroup(GIB, 0, None)


def test_room_never_exceeds_the_limit(tmp_path):
    """The two files are read one after the other, so that the cache may seem larger than all."""
    stat = f"inactive_file {3 * GIB}\n"
    group = {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}", "memory.stat": stat}
    assert version_2(tmp_path, "/a", {"/a": group}) == Cgroup(4 * GIB, 4 * GIB, None)


def test_version_1_without_limits(tmp_path):
    memory = {"a/memory.limit_in_bytes": "9223372036854771712\n"}
    cpu = {"a/cpu.cfs_quota_us": "-1\n", "a/cpu.cfs_period_us": "100000\n"}
    assert version_1(tmp_path, "/a", memory, cpu) == NOTHING


def test_version_1_limits(tmp_path):
    memory = {
        "memory.limit_in_bytes": "9223372036854771712\n",
        "a/memory.limit_in_bytes": f"{8 * GIB}\n",
        "a/memory.usage_in_bytes": f"{6 * GIB}\n",
        "a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "a/b/memory.limit_in_bytes": f"{9 * GIB}\n",
        "a/b/memory.usage_in_bytes": f"{GIB}\n",
    }
    cpu = {"a/b/cpu.cfs_quota_us": "150000\n", "a/b/cpu.cfs_period_us": "50000\n"}
    assert version_1(tmp_path, "/a/b", memory, cpu) == Cgroup(8 * GIB, 3 * GIB, 3.0)


def test_both_versions_side_by_side(tmp_path):
    """The hybrid layout: memory and cpu in version 1, an empty version 2 tree beside them."""
    files = {
        "proc/self/cgroup": "9:memory:/a\n4:cpu,cpuacct:/a\n0::/a\n",
        "proc/self/mountinfo": OTHER
        + MOUNT_2.format(top="/", point="/sys/fs/cgroup/unified")
        + MOUNT_1.format(top="/", point="/sys/fs/cgroup/memory", names="memory"),
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/unified/a/cgroup.procs": "1\n",
    }
    assert read_cgroup(lay_out(tmp_path, files)) == Cgroup(GIB, GIB, None)


def test_a_mount_point_with_a_blank(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": MOUNT_2.format(top="/", point="/mnt/c\\040groups"),
        "mnt/c groups/cpu.max": "50000 100000\n",
    }
    assert read_cgroup(lay_out(tmp_path, files)) == Cgroup(None, None, 0.5)


@pytest.mark.parametrize("text", ["", "\n", "torn", "0:", "1:memory:/a\n" * 3, "0::\n"])
def test_files_that_make_no_sense_limit_nothing(tmp_path, text):
    files = {"proc/self/cgroup": text, "proc/self/mountinfo": text + MOUNT_2}
    assert read_cgroup(lay_out(tmp_path, files)) == NOTHING
