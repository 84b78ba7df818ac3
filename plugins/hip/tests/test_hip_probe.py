"""Each obstacle by itself, on recorded machines, and the kernel driver's files in a folder."""

from __future__ import annotations

import pytest

from strata_core.errors import DeviceError
from strata_core.interfaces import Unusable, Usable
from strata_core.kernels.device.options import used_devices
from strata_core.machine import Adapter
from strata_hip import binding, kernel_driver, plugin, probe

CARD = (Adapter("0x1002", "0x74a1", "0000:65:00.0"),)
OTHER = (Adapter("0x10de", "0x2335", "0000:65:00.0"),)
THERE, MISSING = {"path:/dev/kfd": True}, {"path:/dev/kfd": False}
OPEN = {**THERE, "hip:open /dev/kfd": True, "hip:gpus": [{"node": 1, "architecture": "gfx942"}]}
RUNTIME = {f"library:{name}": name.endswith(".so.7") for name in probe.LIBRARIES}
NO_RUNTIME = {f"library:{name}": False for name in probe.LIBRARIES}
NO_BINDING = {"module:hip": False, "module:rocm": False}
BOUND = {"module:hip": False, "module:rocm": True}


def says(*devices, error="", hint=""):
    """What the runtime answered when the machine was recorded."""
    named = [{"name": name, "architecture": architecture} for name, architecture in devices]
    return {"hip:devices": {"error": error, "hint": hint, "devices": named}}


READY = {**OPEN, **RUNTIME, **BOUND}

CASES = [
    # facts, observed -> reason, words of the hint
    ({"os": "windows"}, {},
     "there is no hip-python package for windows on x86_64, only for linux on x86_64",
     "start Linux"),
    ({"architecture": "aarch64"}, {},
     "there is no hip-python package for linux on aarch64, only for linux on x86_64",
     "another backend"),
    ({}, MISSING, "no AMD graphics adapter on PCI", "pass the adapter through"),
    ({"adapters": OTHER}, MISSING, "no AMD graphics adapter on PCI", "container"),
    ({"wsl": 2}, MISSING, "AMD graphics cards under WSL are not supported", "start Linux itself"),
    ({"adapters": CARD}, {}, "the recorded facts do not say whether /dev/kfd exists",
     "strata-hip installed"),
    ({"adapters": CARD}, MISSING,
     "the amdgpu compute driver is not there (/dev/kfd is missing)", "amdgpu kernel module"),
    ({"adapters": CARD, "container": ("docker",)}, MISSING,
     "the amdgpu compute driver is not there (/dev/kfd is missing)", "--device /dev/kfd"),
    ({"adapters": CARD}, THERE, "the recorded facts do not say what /dev/kfd offers",
     "strata-hip installed"),
    ({"adapters": CARD}, {**OPEN, "hip:open /dev/kfd": False},
     "/dev/kfd may not be opened by this user", "render and video"),
    ({"adapters": CARD}, {**OPEN, "hip:gpus": []},
     "the amdgpu compute driver lists no GPU", "dmesg"),
    ({"adapters": CARD}, {**OPEN, **NO_RUNTIME},
     "the HIP runtime is not found (libamdhip64.so)", "install ROCm"),
    ({"adapters": CARD}, OPEN, "the recorded facts do not say whether ROCm is installed",
     "strata-hip installed"),
    ({"adapters": CARD}, {**OPEN, **RUNTIME},
     "the recorded facts do not say whether there is hip-python", "strata-hip installed"),
    ({"adapters": CARD}, {**OPEN, **RUNTIME, **NO_BINDING},
     "hip-python is not installed", "pip install hip-python"),
    ({"adapters": CARD}, READY,
     "the recorded facts do not say what the HIP runtime answers", "strata-hip installed"),
    ({"adapters": None}, {**READY, **says(error="count devices failed: no HIP library", hint="x")},
     "count devices failed: no HIP library", "x"),
    ({"adapters": CARD}, {**READY, **says()},
     "the HIP runtime is there, but counts 0 devices", "HIP_VISIBLE_DEVICES"),
    ({"adapters": CARD},
     {**READY, **says(error="the HIP library lacks hipGraphLaunch: it is old", hint="newer ROCm")},
     "the HIP library lacks hipGraphLaunch: it is old", "newer ROCm"),
    ({"adapters": ()}, {**READY, **says(("Radeon VII", "gfx900"))},
     "there are no kernels for Radeon VII (gfx900)", "gfx11xx"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "observed", "reason", "hint"), CASES)
def test_the_first_obstacle_is_named(record, facts, observed, reason, hint):
    answer = probe.probe_backend(record(observed, **facts))
    assert isinstance(answer, Unusable)
    assert answer.reason == reason
    assert answer.hint
    assert hint in answer.hint


SERVED = ["gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201"]
NOT_SERVED = ["gfx803", "gfx900", "gfx1010", ""]


@pytest.mark.parametrize("architecture", [*SERVED, *NOT_SERVED])
def test_which_architectures_are_served(architecture):
    assert probe.serves(architecture) is (architecture in SERVED)


def test_a_machine_that_can_be_served(record):
    two = says(("Radeon VII", "gfx900"), ("Instinct MI300X", "gfx942"))
    ready = record({**READY, **two}, adapters=CARD)
    assert probe.probe_backend(ready) == Usable("Instinct MI300X (gfx942)")
    assert probe.probe_allocator(ready) == probe.probe_backend(ready)
    bare = record(MISSING)
    assert probe.probe_allocator(bare) == probe.probe_backend(bare)


def test_devices_for_planning_are_the_recorded_ones(record):
    (backend,) = plugin.strata_backends()
    told = {"name": "Instinct MI300X", "architecture": "gfx942"}
    more = {"total": 192 << 30, "units": 304, "warp": 64}
    answer = {"error": "", "hint": "", "devices": [told, {**told, **more}]}
    first, second = backend.devices(record({**READY, "hip:devices": answer}), {})
    assert (first.label, first.architecture, first.total) == ("HIP0", "gfx942", 0)
    assert (second.index, second.total, second.units, second.warp) == (1, 192 << 30, 304, 64)
    assert backend.devices(record({**READY, **says(error="no library")}), {}) == []
    assert backend.devices(record(READY), {}) == ()


LISTS = [["gfx90c", "gfx1100"], ["gfx1100", "gfx90c"], ["gfx90c", "gfx1100", "gfx900", "gfx942"]]


@pytest.mark.parametrize("architectures", [*LISTS, ["gfx1030"], ["gfx90c"], ["gfx942"] * 6])
def test_devices_without_kernels_are_used_where_they_are_named_alone(record, architectures):
    (backend,) = plugin.strata_backends()
    machine = record({**READY, **says(*((f"card {a}", a) for a in architectures))})
    served = [i for i, a in enumerate(architectures) if probe.serves(a)]
    assert [d.index for d in backend.devices(machine, {})] == served
    every = backend.devices(machine, {"device": (0,)})
    assert [d.index for d in every] == list(range(len(architectures)))
    for options in ({}, {"device": None}, {"device": (), "threads": 2}):
        used = used_devices(probe.with_served(options, every), every) if served else ()
        assert [d.index for d in used] == served[:4]
        assert used == (used_devices(options, backend.devices(machine, options)) if served else ())
    named = {"device": (0,)}
    assert probe.with_served(named, every) is named


def test_the_records():
    (backend,), (allocator,) = plugin.strata_backends(), plugin.strata_allocators()
    assert (backend.name, allocator.name, allocator.serves) == ("hip", "hip-pinned", ("hip",))
    assert backend.capabilities.exact
    assert backend.capabilities.kv_types[0] == "fp16"


def test_without_the_binding_the_backend_says_so(monkeypatch):
    monkeypatch.setattr(binding, "PACKAGES", ("no_such_package_of_hip",))
    (backend,) = plugin.strata_backends()
    with pytest.raises(DeviceError, match=r"^hip-python is not installed\n"):
        backend.build(None)
    assert probe.ask_devices()["error"].startswith("hip-python is not installed")


def test_the_topology_of_the_kernel_driver(tmp_path):
    nodes = {
        "0": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n",
        "10": "cpu_cores_count 0\nsimd_count 96\ngfx_target_version 110001\n",
        "2": "simd_count 1216\ngfx_target_version 90402\n",
        "3": "simd_count 480\ngfx_target_version 90010\nunique_id unreadable\n",
        "4": None,
    }
    for name, text in nodes.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "properties").write_text(text, "ascii")
    assert kernel_driver.list_gpus(tmp_path) == [
        {"node": 2, "architecture": "gfx942"},
        {"node": 3, "architecture": "gfx90a"},
        {"node": 10, "architecture": "gfx1101"},
    ]
    assert kernel_driver.list_gpus(tmp_path / "nowhere") == []


def test_what_may_be_opened(tmp_path):
    assert kernel_driver.can_open(str(tmp_path)) is True
    assert kernel_driver.can_open(str(tmp_path / "nowhere")) is False


def test_nothing_of_the_cuda_plugin_is_imported():
    for module in (plugin, probe, kernel_driver):
        assert "strata_cuda" not in (module.__loader__.get_source(module.__name__) or "")
