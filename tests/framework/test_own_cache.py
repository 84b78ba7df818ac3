"""The tests' own cache folder: nothing that a start learns reaches other tests or the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from strata_core.config import cache_folder

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="macOS names the folder itself")


def folder() -> Path:
    found = cache_folder()
    assert found is not None
    return found


def test_it_is_not_the_users() -> None:
    assert folder().parent.name.startswith("strata-tests-")


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_test_leaves_there_is_gone_for_the_next(number: int) -> None:
    learned = folder() / "profiles"
    assert not learned.exists()
    learned.mkdir()
    (learned / "model.json").write_text(str(number))


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_compiled_kernels_are_kept_for_the_next_run() -> None:
    assert (folder() / "kernels").is_symlink()
    assert (folder() / "kernels").is_dir()
