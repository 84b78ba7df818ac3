"""The measuring programs stand beside the tests; the fixture `device` skips where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def device():
    import lab

    reason = lab.missing()
    if reason:
        pytest.skip(reason)
