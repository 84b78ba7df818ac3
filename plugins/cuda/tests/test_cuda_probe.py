"""Each obstacle by itself, on recorded machines, and the driver's queries on a stand-in."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from strata_core.interfaces import Unusable, Usable
from strata_core.machine import Adapter
from strata_cuda import plugin, probe
from strata_cuda.driver import read_driver

CARD = (Adapter("0x10de", "0x2335", "0000:65:00.0"),)
OTHER = (Adapter("0x1002", "0x74a1", "0000:65:00.0"),)
NO_DEVICE_FILES = {f"path:{path}": False for path in probe.DEVICE_FILES}
FOUND = {"library:libcuda.so.1": True}
NOT_FOUND = {"library:libcuda.so.1": False, "library:/usr/lib/wsl/lib/libcuda.so.1": False}
H200 = {"name": "H200", "capability": [9, 0], "memory": 150 << 30, "units": 132}
OLD = {"name": "P100", "capability": [6, 0], "memory": 16 << 30, "units": 56}


def driver(**changes):
    sound = {"code": 0, "call": "", "error": "", "version": 12080, "devices": [H200]}
    return {"cuda:driver": {**sound, **changes}}


def refusal(code, error, call="cuInit"):
    return driver(code=code, call=call, error=error, version=0, devices=[])


CASES = [
    # facts, observed -> reason, words of the hint
    ({"os": "macos", "architecture": "aarch64"}, {},
     "there is no CUDA driver or no CuPy package for macos on aarch64", ""),
    ({"architecture": "riscv64"}, {},
     "there is no CUDA driver or no CuPy package for linux on riscv64", ""),
    ({"os": "windows", "architecture": "aarch64"}, {},
     "there is no CUDA driver or no CuPy package for windows on aarch64", ""),
    ({}, NO_DEVICE_FILES, "no NVIDIA graphics adapter on PCI", "pass the adapter through"),
    ({"adapters": OTHER}, NO_DEVICE_FILES, "no NVIDIA graphics adapter on PCI", ""),
    ({"wsl": 2}, NO_DEVICE_FILES,
     "WSL 2 offers no graphics adapter (/dev/dxg is missing)", "wsl --update"),
    ({"adapters": CARD}, NOT_FOUND,
     "the NVIDIA driver's library is not found (libcuda.so.1)", "install the NVIDIA driver"),
    ({"adapters": CARD, "container": ("docker",)}, NOT_FOUND,
     "the NVIDIA driver's library is not found (libcuda.so.1)", "--gpus all"),
    ({"wsl": 2}, {"path:/dev/dxg": True, **NOT_FOUND},
     "the NVIDIA driver's library is not found (libcuda.so.1)", "in Windows, not in WSL"),
    ({"os": "windows"}, {"library:nvcuda.dll": False},
     "the NVIDIA driver's library is not found (nvcuda.dll)", "install the NVIDIA driver"),
    ({"adapters": CARD}, {},
     "the recorded facts do not say whether there is a driver", "strata-cuda installed"),
    ({"adapters": CARD}, FOUND,
     "the recorded facts hold no answer of the driver", "strata-cuda installed"),
    ({"adapters": CARD}, {**FOUND, **refusal(100, "CUDA_ERROR_NO_DEVICE")},
     "the NVIDIA driver is there, but cuInit answers CUDA_ERROR_NO_DEVICE (100)",
     "CUDA_VISIBLE_DEVICES"),
    ({"adapters": CARD}, {**FOUND, **refusal(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")},
     "the NVIDIA driver is there, but cuInit answers CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
     "restart the computer"),
    ({"adapters": CARD}, {**FOUND, **refusal(4242, "", "cuDeviceGetCount")},
     "the NVIDIA driver is there, but cuDeviceGetCount answers an unknown error (4242)",
     "nvidia-smi"),
    ({"adapters": CARD}, {**FOUND, **driver(version=11040)},
     "the NVIDIA driver supports CUDA 11.4, 12.0 is needed", "update the NVIDIA driver"),
    ({"adapters": CARD}, {**FOUND, **driver(devices=[])},
     "the NVIDIA driver is there, but counts 0 devices", "CUDA_VISIBLE_DEVICES"),
    ({"adapters": CARD}, {**FOUND, **driver(devices=[OLD])},
     "compute capability 7.0 is needed: P100 has 6.0", ""),
    ({"adapters": CARD}, {**FOUND, **driver()},
     "the recorded facts do not say whether CuPy is installed", "strata-cuda installed"),
    ({"adapters": CARD}, {**FOUND, **driver(), "module:cupy": False},
     "CuPy is not installed", "pip install 'strata-cuda[cuda12]'"),
    ({"adapters": CARD}, {**FOUND, **driver(version=13000), "module:cupy": False},
     "CuPy is not installed", "pip install 'strata-cuda[cuda13]'"),
]  # fmt: skip
ALLOWED = [
    ({"adapters": CARD}, {**FOUND, **driver(), "module:cupy": True}, "CUDA 12.8: H200 (9.0)"),
    ({"adapters": CARD}, {**FOUND, **driver(devices=[OLD, H200]), "module:cupy": True},
     "CUDA 12.8: P100 (6.0), H200 (9.0)"),
    ({"adapters": None}, {**FOUND, **driver(), "module:cupy": True}, "CUDA 12.8: H200 (9.0)"),
    ({"os": "windows"}, {"library:nvcuda.dll": True, **driver(), "module:cupy": True},
     "CUDA 12.8: H200 (9.0)"),
    ({"wsl": 2}, {"path:/dev/dxg": True, "library:libcuda.so.1": False,
                  "library:/usr/lib/wsl/lib/libcuda.so.1": True, **driver(), "module:cupy": True},
     "CUDA 12.8: H200 (9.0)"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "observed", "reason", "hint"), CASES)
def test_the_first_obstacle_is_named(record, facts, observed, reason, hint):
    answer = probe.probe_backend(record(observed, **facts))
    assert isinstance(answer, Unusable)
    assert answer.reason == reason
    assert hint in answer.hint


@pytest.mark.parametrize(("facts", "observed", "detail"), ALLOWED)
def test_nothing_stands_in_the_way(record, facts, observed, detail):
    machine = record(observed, **facts)
    assert probe.probe_backend(machine) == Usable(detail)
    assert probe.probe_allocator(machine) == Usable(detail)


def test_the_allocator_meets_the_same_obstacles(record):
    bare = record(NO_DEVICE_FILES)
    assert probe.probe_allocator(bare) == probe.probe_backend(bare)


def test_devices_for_planning(record):
    ready = record({**FOUND, **driver(devices=[OLD, H200])}, adapters=CARD)
    (backend,) = plugin.strata_backends()
    first, second = backend.devices(ready, {})
    assert (first.label, first.architecture, first.total) == ("CUDA0", "sm_60", 16 << 30)
    assert (second.index, second.name, second.units, second.warp) == (1, "H200", 132, 32)
    assert (first.matrix, second.matrix) == (False, True)
    assert backend.devices(record({}, adapters=CARD), {}) == ()
    assert backend.devices(record({}, os="macos"), {}) == ()


def test_the_records():
    (backend,), (allocator,) = plugin.strata_backends(), plugin.strata_allocators()
    assert (backend.name, allocator.name, allocator.serves) == ("cuda", "cuda-pinned", ("cuda",))
    assert not backend.fallback
    assert backend.capabilities.exact


def test_importing_the_plugin_imports_no_cupy():
    code = "import strata_cuda.plugin, sys; print({'cupy', 'numpy'} & set(sys.modules))"
    path = str(plugin.__spec__.origin).rpartition("strata_cuda")[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({path!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("set()\n", 0)


# --- the driver's queries ----------------------------------------------------------------------


class Driver:
    """A driver with one card; `fail` names a call and what it answers."""

    def __init__(self, fail="", code=0):
        self.fail, self.code = fail, code
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name == self.fail:
                return self.code
            return getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuInit(self, flags):  # noqa: N802 - the driver's name
        assert flags == 0

    def _cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = 12080

    def _cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 1

    def _cuDeviceGet(self, handle, index):  # noqa: N802
        handle._obj.value = 70 + index

    def _cuDeviceGetName(self, name, length, handle):  # noqa: N802
        assert handle.value == 70
        name.value = b"H200"[: length - 1]

    def _cuDeviceGetAttribute(self, value, attribute, handle):  # noqa: N802
        value._obj.value = {16: 132, 75: 9, 76: 0}[attribute]

    def _cuDeviceTotalMem_v2(self, memory, handle):  # noqa: N802
        memory._obj.value = 150 << 30

    def _cuGetErrorName(self, code, text):  # noqa: N802
        if code == 4242:
            return 1
        text._obj.value = ctypes.c_char_p(b"CUDA_ERROR_SOMETHING").value
        return 0


def test_a_driver_that_answers():
    stand_in = Driver()
    answer = read_driver(stand_in)
    assert answer == {"code": 0, "call": "", "error": "", "version": 12080, "devices": [H200]}
    assert not [name for name in stand_in.calls if "Ctx" in name or "Primary" in name]


@pytest.mark.parametrize(
    "call", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceTotalMem_v2"]
)
def test_a_driver_that_refuses(call):
    answer = read_driver(Driver(call, 999))
    assert (answer["code"], answer["call"], answer["error"]) == (999, call, "CUDA_ERROR_SOMETHING")
    assert answer["devices"] == []


def test_an_error_that_the_driver_cannot_name():
    assert read_driver(Driver("cuInit", 4242))["error"] == ""
