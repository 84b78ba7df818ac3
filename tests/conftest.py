"""Fixtures for every area of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata_core.machine import Machine

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the reference models (kjv-moe/, tiny/); skips with the reason without it."""
    named = os.environ.get("STRATA_TEST_MODELS")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip(f"no reference models: {folder} is not there (set STRATA_TEST_MODELS)")
    return folder


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
