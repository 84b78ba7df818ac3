"""Fixtures for every area of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the reference models (kjv-moe/, tiny/); skips with the reason without it."""
    named = os.environ.get("STRATA_TEST_MODELS")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip(f"no reference models: {folder} is not there (set STRATA_TEST_MODELS)")
    return folder
