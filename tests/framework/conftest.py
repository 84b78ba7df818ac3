"""Plugins as the import system sees them, and machines that are not this one."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from strata_core.machine import Machine

DUMMY = Path(__file__).parents[1] / "dummy_plugin"


def _forget_dummies() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "strata_dummy"]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(module, distribution, version): write a distribution, return its entry points.

    Its one entry point names a module of `strata_dummy`, imported afresh in every test.
    """
    site = tmp_path / "site"
    site.mkdir()

    def write(module: str, distribution: str = "", version: str = "1.2"):
        distribution = distribution or f"strata-dummy-{module.replace('_', '-')}"
        folder = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        described = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (folder / "METADATA").write_text(described, "utf-8")
        entry = f"{module.replace('_', '-')} = strata_dummy.{module}"
        (folder / "entry_points.txt").write_text(f"[strata]\n{entry}\n", "utf-8")
        monkeypatch.syspath_prepend(str(site))
        return list(metadata.PathDistribution(folder).entry_points)

    monkeypatch.syspath_prepend(str(DUMMY))
    _forget_dummies()
    yield write
    _forget_dummies()


@pytest.fixture
def make_machine():
    """make_machine(**facts): a replayed Linux PC without an adapter, but for the facts given.

    All that core depends on is installed there.
    """

    def make(**facts: object) -> Machine:
        plain: dict[str, object] = {
            "os": "linux",
            "release": "6.8.0",
            "architecture": "x86_64",
            "python": "CPython 3.11.9",
            "logical_cores": 16,
            "physical_cores": 8,
            "ram_installed": 64 << 30,
            "ram_available": 60 << 30,
            "page_size": 4096,
            "adapters": (),
            "observed": {"module:llvmlite": True},
            "replayed": True,
        }
        return Machine(**{**plain, **facts})

    return make
