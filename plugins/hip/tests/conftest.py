"""Makes this distribution importable from its folder where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from strata_core.machine import Machine

if importlib.util.find_spec("strata_hip") is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def record():
    """record(observed, **facts): a recorded Linux PC with these answers and facts."""

    def make(observed: dict[str, object] | None = None, **facts: object) -> Machine:
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
            "replayed": True,
        }
        return Machine(**{**plain, **facts}, observed=dict(observed or {}))

    return make
