"""A model named relative to the current folder can be read after that folder has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.cli.main import main
from strata_core.interfaces import Expert
from strata_core.testing.tiny import write_tiny_gguf, write_tiny_hub


@pytest.mark.parametrize("form", ["hub", "pack", "model.gguf"])
def test_pieces_are_found_from_elsewhere(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_hub(tmp_path / "hub")
    write_tiny_gguf(tmp_path / "model.gguf")
    if form == "pack":
        assert main(["pack", "hub", "pack", "-q"]) == 0
    experts = open_checkpoint(Path(form)).experts
    expert = Expert(max(experts.layouts), 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for piece, mapped in zip(experts.pieces(expert), experts.mapped(expert), strict=True):
        with piece.file.open("rb") as file:
            file.seek(piece.offset)
            assert file.read(piece.nbytes) == mapped.tobytes()
