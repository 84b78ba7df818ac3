"""Windows and macOS facts from stand-ins of the libraries and commands that are asked."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from strata_core.machine import Adapter, macos, windows

GIB = 1 << 30


class Function:
    """A library's function: called as given, and with the `restype` that ctypes lets one set."""

    def __init__(self, body) -> None:
        self.body = body
        self.restype = None

    def __call__(self, *arguments):
        return self.body(*arguments)


def target(reference):
    """The object behind ctypes.byref."""
    return reference._obj


class Kernel32:
    """A Windows with 4 processors on 2 cores, 3 of them allowed, AVX2 and 64 GiB."""

    def __init__(self) -> None:
        self.GetCurrentProcess = Function(lambda: 2**64 - 1)
        self.GetProcessAffinityMask = Function(self._affinity)
        self.GlobalMemoryStatusEx = Function(self._memory)
        self.GetLogicalProcessorInformation = Function(self._processors)
        self.IsProcessorFeaturePresent = Function(lambda number: number in (38, 39, 40))

    def _affinity(self, handle, process, system):
        assert handle.value == 2**64 - 1
        target(process).value = 0b0111
        target(system).value = 0b1111
        return 1

    def _memory(self, status):
        assert target(status).length == 64
        target(status).total = 64 * GIB
        target(status).available = 50 * GIB
        return 1

    def _processors(self, table, nbytes):
        entries = [(0b0011, 0), (0b1100, 0), (0b1111, 2), (0b1111, 3)]
        size = ctypes.sizeof(windows._ProcessorRelation)
        if table is None:
            target(nbytes).value = len(entries) * size
            return 0
        for item, (mask, relation) in zip(table, entries, strict=True):
            item.mask, item.relation = mask, relation
        return 1


def test_windows_answers():
    kernel32 = Kernel32()
    assert windows.memory(kernel32) == (64 * GIB, 50 * GIB)
    assert windows.affinity(kernel32) == 0b0111
    assert windows.physical_cores(kernel32, 0b0111) == 2
    assert windows.physical_cores(kernel32, 0b1000) == 1
    assert windows.physical_cores(kernel32, 0) == 2
    assert windows.features(kernel32) == ("avx", "avx2", "sse4_2")


def test_windows_refuses():
    kernel32 = Kernel32()
    kernel32.GlobalMemoryStatusEx = Function(lambda status: 0)
    kernel32.GetProcessAffinityMask = Function(lambda *arguments: 0)
    kernel32.GetLogicalProcessorInformation = Function(lambda table, nbytes: 0)
    assert windows.memory(kernel32) == (mmap.PAGESIZE, mmap.PAGESIZE)
    assert windows.affinity(kernel32) == 0
    assert windows.physical_cores(kernel32, 0) == 0


def test_windows_lists_each_display_adapter_once():
    devices = [
        r"PCI\VEN_10DE&DEV_2684&SUBSYS_00000000&REV_A1",
        r"PCI\VEN_10DE&DEV_2684&SUBSYS_00000000&REV_A1",
        "ROOT\\BasicDisplay",
        r"PCI\VEN_8086&DEV_a780&SUBSYS_1",
    ]

    class User32:
        @staticmethod
        def EnumDisplayDevicesW(name, index, device, flags):  # noqa: N802 - Windows' name
            assert target(device).size == 8 + 416 * ctypes.sizeof(ctypes.c_wchar)
            if index >= len(devices):
                return 0
            target(device).id = devices[index]
            return 1

    found = (Adapter("0x10de", "0x2684"), Adapter("0x8086", "0xa780"))
    assert windows.adapters(User32) == found


def test_windows_without_its_libraries_gives_what_python_knows(monkeypatch):
    monkeypatch.delattr(ctypes, "windll", raising=False)
    machine = windows.read_windows()
    assert machine.os == "windows"
    assert machine.adapters is None
    assert machine.logical_cores >= 1


SYSCTL = """hw.memsize: 17179869184
hw.physicalcpu: 8
hw.logicalcpu: 16
machdep.cpu.brand_string: Example CPU: the big one
machdep.cpu.features: FPU AVX1.0 SSE4.2
machdep.cpu.leaf7_features: AVX2 BMI1
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages purgeable:                            400.
"""


def test_macos_answers():
    def ask(command):
        return SYSCTL if "sysctl" in command[0] else VM_STAT

    machine = macos.read_macos(ask)
    assert (machine.os, machine.ram_installed) == ("macos", 16 * GIB)
    assert machine.ram_available == 33400 * 16384
    assert (machine.physical_cores, machine.logical_cores) == (8, 16)
    assert machine.cpu_model == "Example CPU: the big one"
    assert machine.cpu_flags == ("avx", "avx2", "bmi1", "fpu", "sse4.2")


def test_macos_says_nothing():
    machine = macos.read_macos(lambda command: "")
    assert machine.ram_installed == mmap.PAGESIZE
    assert machine.ram_available == 0
    assert machine.logical_cores >= 1


@pytest.mark.parametrize("command", [["/nonexistent/command"], ["/bin/sh", "-c", "sleep 9"]])
def test_a_command_that_fails_or_hangs_says_nothing(command, monkeypatch):
    import subprocess

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: real(*a, **{**k, "timeout": 0.1}))
    assert macos.run(command) == ""
