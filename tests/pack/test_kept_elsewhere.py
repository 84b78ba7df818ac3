"""A pack whose experts a plugin keeps: it opens, only a source that claims its form is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.api import load
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, SelectionError, StrataError
from strata_core.interfaces import Expert
from strata_core.pack.verify import CHECKS, run_checks
from strata_core.pack.write import write_pack
from strata_core.testing.conformance.memory import Silent
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack whose experts.bin is away, with a file that names the form they have instead."""
    write_tiny_hub(tmp_path / "model", hyper=tiny_hyper())
    write_pack(open_checkpoint(tmp_path / "model"), tmp_path / "pack", Silent())
    (tmp_path / "pack" / "experts.bin").rename(tmp_path / "experts.bin")
    (tmp_path / "pack" / "experts.form").write_text("far\n")
    return tmp_path / "pack"


def test_it_opens_with_everything_but_the_experts_bytes(pack: Path) -> None:
    found = open_checkpoint(pack)
    assert found.form == "far"
    assert found.files == (pack / "dense.bin",)
    assert found.metadata()["form"] == "far"
    pieces = found.experts.pieces(Expert(0, 1))
    assert {piece.file for piece in pieces} == {pack / "experts.bin"}
    with pytest.raises(CheckpointError, match="a plugin keeps the experts"):
        found.experts.mapped(Expert(0, 1))
    (pack.parent / "experts.bin").rename(pack / "experts.bin")
    whole = open_checkpoint(pack)
    assert whole.form == "pack"
    assert whole.model_hash == found.model_hash
    assert whole.experts.pieces(Expert(0, 1)) == pieces


def test_no_built_in_source_is_chosen_for_it(pack: Path) -> None:
    with pytest.raises(SelectionError, match="'far'"):
        load(pack)


@pytest.mark.parametrize("source", ["arena", "mmap"])
def test_a_built_in_source_that_is_named_says_what_is_missing(pack: Path, source: str) -> None:
    with pytest.raises(StrataError, match=r"experts\.bin"), load(pack, source=source) as model:
        model.logits([1, 2])


def test_verify_says_what_it_could_not_look_at(pack: Path) -> None:
    found = {o.check: o.verdict for o in run_checks(CHECKS, open_checkpoint(pack), Silent())}
    assert found["experts"] == "not possible"
    assert {v for check, v in found.items() if check != "experts"} == {"ok"}


@pytest.mark.parametrize("name", ["", "Far", "pack", "../x", "a b", "\xff"])
def test_a_form_that_is_none_is_refused(name: str, pack: Path) -> None:
    (pack / "experts.form").write_bytes(name.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"experts\.form"):
        open_checkpoint(pack)


def test_neither_experts_nor_a_form_is_an_error(pack: Path) -> None:
    (pack / "experts.form").unlink()
    with pytest.raises(CheckpointError, match=r"experts\.bin"):
        open_checkpoint(pack)
