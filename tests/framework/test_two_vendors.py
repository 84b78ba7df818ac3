"""Two plugins for graphics cards installed together: the machine decides, else the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from strata_core.errors import SelectionError
from strata_core.machine import Adapter
from strata_core.plugins.catalogue import Offer
from strata_core.selection import select_allocator, select_backend

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"

pytestmark = pytest.mark.skipif(
    not PLUGINS.is_dir(), reason="a source distribution of core has no plugins folder"
)

GREEN = {
    "library:libcuda.so.1": True,
    "cuda:driver": {
        "code": 0,
        "call": "",
        "error": "",
        "version": 12080,
        "devices": [{"name": "A card", "capability": [8, 9], "memory": 24 << 30}],
    },
    "module:cupy": True,
}
RED = {
    "path:/dev/kfd": True,
    "hip:open /dev/kfd": True,
    "hip:gpus": [{"node": 1, "architecture": "gfx1100"}],
    "module:hip": True,
    "module:rocm": True,
    "hip:devices": {
        "error": "",
        "hint": "",
        "devices": [
            {
                "name": "Another card",
                "architecture": "gfx1100",
                "total": 24 << 30,
                "units": 96,
                "warp": 32,
            }
        ],
    },
}
NO_RED = {"path:/dev/kfd": False}
NO_GREEN = {"path:/dev/nvidiactl": False, "path:/dev/nvidia0": False, "path:/dev/dxg": False}
NVIDIA, AMD = (
    Adapter("0x10de", "0x2684", "0000:01:00.0"),
    Adapter("0x1002", "0x744c", "0000:02:00.0"),
)


@pytest.fixture
def choose(monkeypatch, make_machine):
    """choose(request, observed, adapters): the answers for backend and then its allocator."""
    for name in ("cuda", "hip"):
        monkeypatch.syspath_prepend(str(PLUGINS / name))
    from strata_core import builtin
    from strata_cuda import plugin as cuda
    from strata_hip import plugin as hip

    def offers(hook):
        modules = ((builtin, "core"), (hip, "strata-hip"), (cuda, "strata-cuda"))
        return [
            Offer(record, distribution, "0.1.0")
            for module, distribution in modules
            for record in getattr(module, hook)()
        ]

    backends, allocators = offers("strata_backends"), offers("strata_allocators")

    def run(request, observed, *adapters):
        machine = make_machine({"module:llvmlite": True, **observed}, adapters=adapters)
        probes = {offer.name: offer.record.probe(machine) for offer in [*backends, *allocators]}
        chosen = select_backend(backends, (), probes, request)
        if isinstance(chosen, SelectionError):
            return chosen, None
        return chosen, select_allocator(allocators, (), probes, chosen.name)

    return run


@pytest.mark.parametrize(
    ("observed", "adapter", "names"),
    [
        ({**GREEN, **NO_RED}, NVIDIA, ("cuda", "cuda-pinned")),
        ({**RED, **NO_GREEN}, AMD, ("hip", "hip-pinned")),
        ({**NO_RED, **NO_GREEN}, None, ("cpu", "host")),
    ],
)
def test_the_machine_decides(choose, observed, adapter, names):
    backend, allocator = choose("auto", observed, *filter(None, [adapter]))
    assert (backend.name, allocator.name) == names


def test_both_usable_is_an_error_that_names_the_flag(choose):
    refused, _ = choose("auto", {**GREEN, **RED}, NVIDIA, AMD)
    assert isinstance(refused, SelectionError)
    assert refused.what == "several backends can be used: cuda, hip"
    assert refused.remedy == "choose with --backend cuda or --backend hip"


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_both_usable_and_one_named(choose, name):
    backend, allocator = choose(name, {**GREEN, **RED}, NVIDIA, AMD)
    assert (backend.name, allocator.name) == (name, f"{name}-pinned")
    assert backend.because == "named by --backend"


def test_hip_is_named_where_there_is_no_amd_device(choose):
    refused, _ = choose("hip", {**GREEN, **NO_RED}, NVIDIA)
    assert isinstance(refused, SelectionError)
    assert refused.what == "backend 'hip' cannot be used"
    assert refused.why == "no AMD graphics adapter on PCI"
    assert "pass the adapter through; usable here: cpu, cuda" in refused.remedy


def test_hip_is_named_where_nothing_may_open_the_driver(choose):
    closed = {**RED, "hip:open /dev/kfd": False, **NO_GREEN}
    refused, _ = choose("hip", closed, AMD)
    assert refused.why == "/dev/kfd may not be opened by this user"
    assert refused.remedy.startswith("add the user to the groups render and video")


# --- the program itself, with both distributions installed -------------------------------------


def installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def program(tmp_path):
    """program(*arguments): exit code, document and messages of a process that has both plugins."""
    paths = [str(PLUGINS.parent)]
    for name in ("cuda", "hip"):
        if not installed(f"strata-{name}"):
            described = tmp_path / f"strata_{name}-0.1.0.dist-info"
            described.mkdir()
            about = f"Metadata-Version: 2.1\nName: strata-{name}\nVersion: 0.1.0\n"
            (described / "METADATA").write_text(about)
            (described / "entry_points.txt").write_text(
                f"[strata]\n{name} = strata_{name}.plugin\n"
            )
            paths.append(str(PLUGINS / name))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, str(tmp_path)]),
        "STRATA_BLOCK_PLUGINS": "wsl",
    }

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "strata_core", *arguments, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    return run


def test_the_program_plans_for_a_machine_with_both(program, make_machine, tmp_path):
    machine = make_machine(
        {"module:llvmlite": True, **GREEN, **RED}, adapters=(NVIDIA, AMD)
    ).to_json()
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(machine))
    code, said, shown = program("plan", "demo", "--machine", str(facts))
    assert code == 2, shown
    assert said["error"]["what"] == "several backends can be used: cuda, hip"
    assert said["error"]["remedy"] == "choose with --backend cuda or --backend hip"
    for name in ("cuda", "hip"):
        code, said, shown = program("plan", "demo", "--machine", str(facts), "--backend", name)
        assert code == 0, shown
        assert [s["name"] for s in said["selections"]][:2] == [name, f"{name}-pinned"]


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine may have an AMD device")
def test_the_program_says_why_hip_cannot_be_used(program):
    code, said, shown = program("generate", "demo", "x", "-n", "1", "--backend", "hip")
    assert code == 2, shown
    assert said["error"]["what"] == "backend 'hip' cannot be used"
    assert said["error"]["why"]
    assert "usable here: cpu" in said["error"]["remedy"]
