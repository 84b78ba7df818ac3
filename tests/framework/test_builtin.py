"""The built-in records: usable everywhere, built lazily; and what importing the framework costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from strata_core import builtin
from strata_core.interfaces import API, Unusable, Usable
from strata_core.plugins import load_plugins

BUILDS = [
    ("backend", "cpu", "strata_core.kernels.cpu.backend"),
    ("backend", "reference", "strata_core.kernels.reference_backend"),
    ("backend", "sim", "strata_core.testing.sim_backend"),
    ("allocator", "host", "strata_core.memory.host"),
    ("source", "arena", "strata_core.sources.arena"),
    ("source", "mmap", "strata_core.sources.mmap"),
    ("source", "sliced-pinned", "strata_core.sources.sliced_pinned"),
    ("source", "tiered-file", "strata_core.sources.tiered_file"),
]


@pytest.mark.parametrize(("role", "name", "module"), BUILDS)
def test_a_record_builds_through_its_module(role, name, module, monkeypatch):
    offer = next(offer for offer in load_plugins([]).offers(role) if offer.name == name)
    stand_in = ModuleType(module)
    stand_in.build = lambda context: ("built from", context)
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert offer.record.build("a context") == ("built from", "a context")


@pytest.mark.parametrize(("role", "name", "module"), BUILDS)
def test_the_module_is_really_there(role, name, module):
    __import__(module)
    assert callable(sys.modules[module].build)


def test_the_records_serve_every_machine(make_machine):
    records = [
        *builtin.strata_backends(),
        *builtin.strata_allocators(),
        *builtin.strata_expert_sources(),
    ]
    assert [record.name for record in records] == [
        *("cpu", "reference", "sim"),
        *("host", "sim-pinned"),
        *("arena", "mmap", "sliced-pinned", "tiered-file"),
    ]
    assert {record.name for record in records if record.fallback} == {"cpu", "reference"}
    assert {record.name: record.supersedes for record in records if record.supersedes} == {
        "cpu": ("reference",)
    }
    assert [item.automatic for item in builtin.strata_backends()] == [True, True, False]
    for machine in (make_machine(), make_machine(os="windows", architecture="aarch64")):
        assert {type(record.probe(machine)) for record in records} == {Usable}
    assert {record.api for record in records} == {API}


@pytest.mark.parametrize(
    ("observed", "answer"),
    [
        ({"module:llvmlite": True}, Usable("x86_64, 8 cores")),
        (
            {"module:llvmlite": False},
            Unusable(
                "the package llvmlite, which compiles the kernels, is not installed",
                "pip install llvmlite",
            ),
        ),
        ({}, Unusable("whether the package llvmlite is installed there was not recorded")),
    ],
)
def test_cpu_needs_its_compiler(observed, answer, make_machine):
    cpu, reference, _ = builtin.strata_backends()
    machine = make_machine(observed=observed)
    assert cpu.probe(machine) == answer
    assert reference.probe(machine) == Usable("linux x86_64")


@pytest.mark.parametrize(
    "modules",
    [
        "strata_core.plugins",
        "strata_core.selection",
        "strata_core.machine",
        "strata_core.builtin",
        "strata_core.plugin_report",
        "strata_core.hookspecs",
    ],
)
def test_importing_the_framework_is_light(modules):
    """Each by itself, so that no order of imports is needed; no plugin and nothing heavy comes."""
    code = (
        f"import sys, {modules}\n"
        "heavy = {'numpy', 'rich', 'tokenizers', 'safetensors', 'llvmlite', 'numba', 'jinja2',"
        " 'strata_cuda', 'strata_hip', 'strata_wsl'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_loading_and_reading_the_machine_import_nothing_heavy_either():
    code = (
        "import sys\n"
        "from strata_core.machine import read_machine\n"
        "from strata_core.plugins import load_plugins, probe_catalogue\n"
        "probe_catalogue(load_plugins([]), read_machine())\n"
        "print({'numpy', 'llvmlite'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
