"""Makes this distribution importable from its folder where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from strata_core.testing.machines import recorded_pc

if importlib.util.find_spec("strata_wsl") is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def record():
    """record(observed, **facts): a recorded Linux PC with these answers and facts."""

    return recorded_pc
