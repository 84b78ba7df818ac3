"""Recorded machines for tests: plain facts that a test changes where it matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata_core.machine import Machine


def recorded_pc(observed: Mapping[str, Any] | None = None, **facts: Any) -> Machine:
    """A replayed Linux PC of 16 threads and 64 GiB without a graphics adapter.

    `observed` are the answers it recorded (none by default); `facts` replace fields of `Machine`.
    """
    plain: dict[str, Any] = {
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
