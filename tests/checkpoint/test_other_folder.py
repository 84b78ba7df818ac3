"""A model named relative to the current folder can be read after that folder has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.cli.main import main
from strata_core.errors import CheckpointError
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


@pytest.mark.parametrize("form", ["hub", "pack"])
def test_a_part_of_a_folder_says_that_the_folder_is_meant(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_hub(tmp_path / "hub")
    if form == "pack":
        assert main(["pack", "hub", "pack", "-q"]) == 0
    parts = [path for path in Path(form).iterdir() if path.is_file()]
    assert len(parts) > 1
    for part in parts:
        if form == "hub" and part.suffix not in (".json", ".safetensors"):
            continue
        with pytest.raises(CheckpointError, match="not a model by itself") as caught:
            open_checkpoint(part)
        assert caught.value.remedy == f"name the folder: {form}"
    # what lies beside a folder's files is a model as elsewhere
    write_tiny_gguf(tmp_path / form / "own.gguf")
    assert open_checkpoint(Path(form) / "own.gguf").form == "gguf"
