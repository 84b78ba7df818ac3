"""Windows and macOS through stand-ins for their system libraries and commands."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
from types import SimpleNamespace

import pytest

import strata_core.machine as package
from strata_core.machine import Adapter, Machine
from strata_core.machine import macos as mac
from strata_core.machine import windows as win


class Kernel32:
    """kernel32.dll of a PC with 4 cores of 2 processors each, of which 6 may be used."""

    mask = 0b00111111
    refuse = False

    def __init__(self) -> None:
        self.GetCurrentProcess = SimpleFunction(lambda: (1 << 64) - 1)

    def GlobalMemoryStatusEx(self, status):  # noqa: N802
        status = status._obj
        assert status.length == 64
        status.total, status.available = 32 << 30, 20 << 30
        return not self.refuse

    def GetProcessAffinityMask(self, handle, process, system):  # noqa: N802
        assert handle.value == (1 << 64) - 1, "a pseudo handle is as wide as a pointer"
        process._obj.value, system._obj.value = self.mask, 0xFF
        return not self.refuse

    def GetLogicalProcessorInformation(self, table, nbytes):  # noqa: N802
        masks = [(0b11 << 2 * core, 0) for core in range(4)] + [(0xFF, 1), (0xFF, 3)]
        size = ctypes.sizeof(win._ProcessorRelation)
        if self.refuse:
            return 0
        if table is None:
            nbytes._obj.value = size * len(masks)
            return 0
        assert nbytes._obj.value == size * len(masks)
        for item, (mask, relation) in zip(table, masks, strict=True):
            item.mask, item.relation = mask, relation
        return 1

    def IsProcessorFeaturePresent(self, number):  # noqa: N802
        return number in (38, 39, 40)


class SimpleFunction:
    """A library's function: callable, and its result type can be set."""

    def __init__(self, call):
        self.call = call
        self.restype = ctypes.c_int

    def __call__(self):
        assert self.restype is ctypes.c_void_p
        return self.call()


class User32:
    """user32.dll with one card that drives two displays, another vendor's, and a remote one."""

    ids = (
        r"PCI\VEN_10AB&DEV_2684&SUBSYS_00000000&REV_A1",
        r"PCI\VEN_10AB&DEV_2684&SUBSYS_00000000&REV_A1",
        r"PCI\VEN_8086&DEV_a780&SUBSYS_00000000",
        r"ROOT\BasicRender",
    )

    def EnumDisplayDevicesW(self, name, index, device, flags):  # noqa: N802
        assert (name, flags) == (None, 0)
        assert device._obj.size == ctypes.sizeof(win._DisplayDevice)
        if index >= len(self.ids):
            return 0
        device._obj.id = self.ids[index]
        return 1


def on_windows(monkeypatch, libraries) -> Machine:
    monkeypatch.setattr(ctypes, "windll", libraries, raising=False)
    monkeypatch.setattr(package.sys, "platform", "win32")
    monkeypatch.setattr(platform, "version", lambda: "10.0.26100")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(platform, "processor", lambda: "Family 6 Model 183")
    return package.read_machine()


def test_windows(monkeypatch):
    machine = on_windows(monkeypatch, SimpleNamespace(kernel32=Kernel32(), user32=User32()))
    assert (machine.os, machine.release, machine.architecture) == (
        "windows",
        "10.0.26100",
        "x86_64",
    )
    assert (machine.logical_cores, machine.physical_cores) == (6, 3)
    assert (machine.ram_installed, machine.ram_available) == (32 << 30, 20 << 30)
    assert machine.cpu_flags == ("avx", "avx2", "sse4_2")
    assert machine.adapters == (Adapter("0x10ab", "0x2684"), Adapter("0x8086", "0xa780"))
    assert (machine.wsl, machine.memlock_limit, machine.cgroup_memory_limit) == (None, None, None)
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("libraries", [None, SimpleNamespace(), "refusing"])
def test_windows_that_answers_nothing(monkeypatch, libraries):
    if libraries == "refusing":
        kernel32 = Kernel32()
        kernel32.refuse = True
        libraries = SimpleNamespace(kernel32=kernel32, user32=None)
    machine = on_windows(monkeypatch, libraries)
    assert machine.logical_cores >= 1
    assert machine.physical_cores == machine.logical_cores
    assert (machine.ram_installed, machine.ram_available) == (mmap.PAGESIZE, mmap.PAGESIZE)
    assert machine.adapters is None
    assert Machine.from_json(machine.to_json()) == machine


SYSCTL = """hw.memsize: 34359738368
hw.physicalcpu: 8
hw.logicalcpu: 16
machdep.cpu.brand_string: A processor: 8 cores
machdep.cpu.features: FPU SSE4.2 AVX1.0
machdep.cpu.leaf7_features: AVX2 BMI1
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            700000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages purgeable:                            400.
"Translation faults":                  12345678.
"""


def answers(sysctl: str, vm_stat: str):
    def ask(command):
        return {"sysctl": sysctl, "vm_stat": vm_stat}[command[0].rpartition("/")[2]]

    return ask


def test_macos():
    machine = mac.read_macos(answers(SYSCTL, VM_STAT))
    assert machine.os == "macos"
    assert (machine.logical_cores, machine.physical_cores) == (16, 8)
    assert machine.ram_installed == 32 << 30
    assert machine.ram_available == (10000 + 20000 + 3000 + 400) * 16384
    assert machine.cpu_model == "A processor: 8 cores"
    assert machine.cpu_flags == ("avx", "avx2", "bmi1", "fpu", "sse4_2")
    assert machine.adapters is None
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(("sysctl", "vm_stat"), [("", ""), ("torn", "page size of no bytes")])
def test_macos_that_answers_nothing(sysctl, vm_stat):
    machine = mac.read_macos(answers(sysctl, vm_stat))
    assert machine.logical_cores >= 1
    assert machine.ram_installed == mmap.PAGESIZE
    assert machine.ram_available == 0


def test_macos_is_asked_on_macos(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(package.sys, "platform", "darwin")
    assert package.read_machine().os == "macos"
    assert [command[0] for command in asked] == ["/usr/sbin/sysctl", "/usr/bin/vm_stat"]
