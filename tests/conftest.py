"""Fixtures for every area of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata_core.machine import Machine
from strata_core.testing.machines import recorded_pc

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

    def make(observed: dict[str, object] | None = None, **facts: object) -> Machine:
        return recorded_pc({"module:llvmlite": True} if observed is None else observed, **facts)

    return make


def pytest_terminal_summary(terminalreporter) -> None:
    """How many device kernels were compiled for whom, or why none were."""
    told = [
        value
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "compiled"
    ]
    for line in dict.fromkeys(told):
        terminalreporter.write_line(f"device kernels, {line}")
