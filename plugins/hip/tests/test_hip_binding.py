"""Which hip-python there is and which library it opens: every way in which that goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stub

from strata_core.errors import DeviceError
from strata_hip import binding as hip_binding
from strata_hip.binding import Binding, load_binding, opened_library
from strata_hip.compiler import Compiler
from strata_hip.probe import ask_devices
from strata_hip.runtime import HipRuntime, describe_all

OWN = "libstub.so"

needs_compiler = pytest.mark.skipif(stub.compiler() is None, reason="there is no C compiler")


def older(monkeypatch, rocm):
    """hip-python before version 10, and none newer: the modules hip.hip and hip.hiprtc."""
    package = ModuleType("hip")
    package.__path__ = []
    package.hip, package.hiprtc = stub.stand_in(rocm)
    monkeypatch.setitem(sys.modules, "rocm", None)
    monkeypatch.setitem(sys.modules, "rocm.bindings.hip", None)
    monkeypatch.setitem(sys.modules, "hip", package)
    monkeypatch.setitem(sys.modules, "hip.hip", package.hip)
    monkeypatch.setitem(sys.modules, "hip.hiprtc", package.hiprtc)


@needs_compiler
def test_the_older_layout_is_found(monkeypatch, tmp_path):
    older(monkeypatch, stub.build(tmp_path, name=OWN))
    found = load_binding()
    assert (found.package, found.fills_properties) == ("hip", True)
    assert [d["architecture"] for d in ask_devices()["devices"]] == ["gfx1030", "gfx90a"]


def test_no_library(monkeypatch, tmp_path):
    older(monkeypatch, tmp_path)
    said = ask_devices()
    assert said["error"].startswith("count devices failed: no HIP library: failed to dlopen")
    assert "ROCM_PATH/lib/libamdhip64.so, without a version" in said["hint"]
    assert said["devices"] == []


@needs_compiler
def test_a_library_older_than_the_binding(monkeypatch, tmp_path):
    older(monkeypatch, stub.build(tmp_path, "-DOLD_LIBRARY", name=OWN))
    said = ask_devices()
    assert said["error"].startswith(
        "describe HIP0 failed: the HIP library lacks hipGetDevicePropertiesR0600"
    )
    assert "a newer ROCm" in said["hint"]


@needs_compiler
def test_a_verb_that_the_library_lacks(monkeypatch, tmp_path):
    older(monkeypatch, stub.build(tmp_path, "-DWITHOUT_GRAPHS", name=OWN))
    found = load_binding()
    with pytest.raises(DeviceError, match="lacks hipGraphLaunch"):
        found.call("launch a graph", found.hip.hipGraphLaunch, 1, 2)


@needs_compiler
def test_no_device(monkeypatch, tmp_path):
    rocm = stub.build(tmp_path, name=OWN)
    older(monkeypatch, rocm)
    stub.Control(rocm).fail(1, 100, "hipGetDeviceCount")
    assert ask_devices()["error"] == (
        "count devices failed: hipGetDeviceCount answers hipErrorNoDevice (100)"
    )


def test_no_hip_python(monkeypatch):
    for name in ("rocm", "rocm.bindings", "rocm.bindings.hip", "hip", "hip.hip"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match="there is neither a module"):
        load_binding()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["7f r-xp  /opt/rocm/lib/libamdhip64.so.7"] * 2, "/opt/rocm/lib/libamdhip64.so.7"),
        (["7f-8f r-xp 00 08:01 9  /usr/lib/libc.so.6"], "cannot be found"),
        (["7f r-xp  /opt/rocm/lib/libamdhip64.so.7", "9f r-xp  /usr/lib/libamdhip64.so.5"],
         "several HIP libraries in this process"),
    ],
)  # fmt: skip
def test_the_library_that_is_open(tmp_path, lines, found):
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines), "utf-8")
    silent = ModuleType("hip.hip")
    silent.hipGetDeviceCount = lambda: (0, 1)
    binding = Binding(silent, silent, "hip")
    if found.startswith("/"):
        assert opened_library(binding, maps) == found
        return
    with pytest.raises(DeviceError, match=found):
        opened_library(binding, maps)


def test_a_status_without_a_name():
    def hipMalloc(nbytes):  # noqa: N802
        raise ValueError("4242 is not a valid hipError_t")

    with pytest.raises(DeviceError, match="hipMalloc: 4242 is not a valid hipError_t"):
        hip_binding.checked("allocate", hipMalloc, 1)


@needs_compiler
@pytest.mark.skipif(
    not any(find_spec(name) for name in ("rocm", "hip")), reason="hip-python is not installed"
)
def test_all_verbs_through_the_real_hip_python(tmp_path):
    """In a process of its own: the binding opens one library, once."""
    rocm = stub.build(tmp_path)
    core = Path(__file__).parents[3]
    paths = [str(core), str(core / "plugins" / "hip"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "ROCM_PATH": str(rocm),
        "LD_LIBRARY_PATH": str(rocm / "lib"),
        "STRATA_HIP_TEST_BINDING": "real",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    suite = Path(__file__).with_name("test_hip_verbs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_records_open_nothing():
    """Building a runtime opens no library: these modules have no function that could."""
    empty = Binding(ModuleType("hip"), ModuleType("hiprtc"), "hip")
    HipRuntime(empty, Compiler(empty)).close()
    assert describe_all.__module__ == "strata_hip.runtime"
