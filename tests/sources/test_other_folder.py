"""A model named relative to the current folder is read after that folder has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import strata_core
from strata_core.cli.main import main
from strata_core.testing.tiny import write_tiny_hub


@pytest.mark.parametrize("source", ["arena", "mmap", "tiered-file"])
@pytest.mark.parametrize("form", ["hub", "pack"])
def test_the_folder_changes_after_the_load(
    source: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_hub(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    if form == "pack":
        assert main(["pack", "hub", "pack", "-q"]) == 0
    with strata_core.load("hub", source="mmap", backend="reference") as model:
        expected = model.logits([5, 6, 7])
    with strata_core.load(form, source=source, backend="reference") as model:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert (model.logits([5, 6, 7]) == expected).all()
