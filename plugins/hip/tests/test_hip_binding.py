"""Which hip-python there is and which library it opens: every way in which that goes wrong."""

from __future__ import annotations

import os
import re
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
from strata_hip import library
from strata_hip.binding import Binding, load_binding
from strata_hip.compiler import Compiler
from strata_hip.probe import ask_devices
from strata_hip.runtime import HipRuntime, describe_all

OWN = "libstub.so"
ON_CUDA = Path(__file__).parents[3] / "tests" / "device" / "hip_on_cuda.c"
DEBIANS = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so")

needs_compiler = pytest.mark.skipif(stub.compiler() is None, reason="there is no C compiler")


def older(monkeypatch, rocm):
    """hip-python before version 10, and none newer: the modules hip.hip and hip.hiprtc.

    The stub is what counts as mapped: other tests of this process have HIP's name for theirs.
    """
    monkeypatch.setattr(library, "mapped_library", lambda: str(stub.library_of(rocm)))
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
@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("-DOLD_LIBRARY", ("hipGetDevicePropertiesR0600",)),
        ("-DWITHOUT_GRAPHS", ("hipGraphLaunch",)),
        ("-DOLD_LIBRARY -DWITHOUT_GRAPHS", ("hipGetDevicePropertiesR0600", "hipGraphLaunch")),
    ],
)
def test_all_that_a_library_lacks_is_told_before_anything_is_done(
    monkeypatch, tmp_path, option, names
):
    older(monkeypatch, stub.build(tmp_path, *option.split(), name=OWN))
    said = ask_devices()
    assert said["error"].startswith(f"the HIP library lacks {', '.join(names)}: ")
    assert f"{OWN} is older" in said["error"]
    assert "a newer ROCm" in said["hint"]
    assert said["devices"] == []


@needs_compiler
def test_a_verb_that_the_library_lacks(monkeypatch, tmp_path):
    older(monkeypatch, stub.build(tmp_path, "-DWITHOUT_GRAPHS", name=OWN))
    found = load_binding()
    with pytest.raises(DeviceError, match="lacks hipGraphLaunch"):
        found.call("launch a graph", found.hip.hipGraphLaunch, 1, 2)


def lacking_of(path):
    """What a library lacks, in a process of its own: two of HIP's name in one are refused."""
    code = f"from strata_hip.library import lacking; print(*lacking({str(path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(not DEBIANS.exists(), reason="Debian's libamdhip64-dev is not installed")
def test_what_hip_5_2_lacks():
    assert lacking_of(DEBIANS) == ["hipGetDevicePropertiesR0600"]


@needs_compiler
@pytest.mark.skipif(not ON_CUDA.exists(), reason="not in a checkout of the repository")
def test_the_library_over_another_vendors_driver_lacks_nothing(tmp_path):
    """It opens that driver's libraries when it is called, so that it builds anywhere."""
    built = tmp_path / "libamdhip64.so"
    command = [stub.compiler(), "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(built)]
    subprocess.run([*command, str(ON_CUDA), "-ldl"], check=True, timeout=240)
    assert lacking_of(built) == []


def test_every_function_that_is_called_is_looked_for():
    """Names in the sources of what calls; a type of the binding is none of the library's."""
    types = {"hipDeviceProp_t", "hipMemcpyKind", "hipStreamCaptureMode"}
    types |= {"hipDeviceAttribute_t", "hipDeviceAttributeWallClockRate"}
    folder = Path(library.__file__).parent
    text = "".join((folder / f"{name}.py").read_text() for name in ("runtime", "compiler"))
    called = set(re.findall(r"""(?:\.|(?<!")")(hip[A-Z]\w+)""", text)) - types
    symbols = {stub.SYMBOLS.get(name, name) for name in called}
    assert symbols == set(library.NEEDED)


@needs_compiler
@pytest.mark.parametrize(
    ("status", "why", "hint"),
    [
        (100, "hipGetDeviceCount answers hipErrorNoDevice (100)", "HIP_VISIBLE_DEVICES"),
        (3, "hipGetDeviceCount answers hipErrorNotInitialized (3)", "rocminfo"),
        (35, "hipGetDeviceCount answers hipErrorInsufficientDriver (35)", "kernel driver"),
        (999, "hipGetDeviceCount answers hipErrorUnknown (999)", "strata doctor"),
    ],
)
def test_a_runtime_that_lists_no_devices(monkeypatch, tmp_path, status, why, hint):
    rocm = stub.build(tmp_path, name=OWN)
    older(monkeypatch, rocm)
    stub.Control(rocm).fail(1, status, "hipGetDeviceCount")
    said = ask_devices()
    assert said["error"] == f"count devices failed: {why}"
    assert hint in said["hint"]


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
    if found.startswith("/"):
        assert library.mapped_library(maps) == found
        return
    with pytest.raises(DeviceError, match=found):
        library.mapped_library(maps)


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
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_records_open_nothing():
    """Building a runtime opens no library: these modules have no function that could."""
    empty = Binding(ModuleType("hip"), ModuleType("hiprtc"), "hip")
    HipRuntime(empty, Compiler(empty)).close()
    assert describe_all.__module__ == "strata_hip.runtime"
