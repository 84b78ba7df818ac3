"""An empty place for distributions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from installing import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An empty place; needs pip and hatchling."""
    for needed in ("pip", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"installing a distribution needs {needed}")
    base = tmp_path_factory.mktemp("place")
    made = Place(base / "site", base / "folder")
    made.site.mkdir()
    made.folder.mkdir()
    return made
