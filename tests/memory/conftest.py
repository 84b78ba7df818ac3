"""The simulated machines stand beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def bench():
    """bench(**options): a `simulated.Bench` that is finished and checked when the test ends."""
    from simulated import Bench

    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.finish()
