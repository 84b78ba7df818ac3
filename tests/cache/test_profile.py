"""Profiles as files and as orders of experts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strata_core
from strata_core.cache.profile import Profile, read_profile, write_profile
from strata_core.cache.rank import ranking, rates
from strata_core.cli.main import main
from strata_core.errors import StrataError, UsageError
from strata_core.interfaces import Expert

GOOD: dict[str, Any] = {
    "format": "strata-profile",
    "version": 1,
    "model_hash": "abc",
    "experts": 2,
    "counts": {"0": [1, 2], "7": [0, 5]},
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version"),
        ({"model_hash": 3}, "model_hash"),
        ({"experts": 0}, "experts"),
        ({"experts": True}, "experts"),
        ({"experts": 3}, "counts.0"),
        ({"counts": []}, "counts"),
        ({"counts": {}}, "counts"),
        ({"counts": {"-1": [1, 2]}}, "'-1'"),
        ({"counts": {"0": [1, -2]}}, "counts.0"),
        ({"counts": {"0": [1, 2.0]}}, "counts.0"),
        ({"counts": {"0": "12"}}, "counts.0"),
        ({"counts": {"1" * 5000: [1, 2]}}, "the number of a layer"),
    ],
)
def test_a_damaged_file_names_the_field(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(GOOD), "utf-8")
    assert read_profile(path) == Profile("abc", 2, {0: (1, 2), 7: (0, 5)})
    path.write_text(json.dumps(GOOD | change), "utf-8")
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert str(path) in caught.value.what
    assert field in caught.value.why


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_profile_at_all_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no profile"):
        read_profile(path)
    with pytest.raises(UsageError, match="no profile"):
        read_profile(tmp_path / "none")


counts = st.dictionaries(
    st.integers(0, 90), st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4), min_size=1
)


@given(counts=counts)
def test_a_ranking_orders_by_count_and_keeps_every_expert(counts, tmp_path_factory) -> None:
    profile = Profile.of("m", counts)
    path = tmp_path_factory.mktemp("p") / "p.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    order = ranking(profile, counts, 4)
    assert sorted(order) == sorted(Expert(layer, i) for layer in counts for i in range(4))
    asked = [counts[expert.layer][expert.index] for expert in order]
    assert asked == sorted(asked, reverse=True)
    expected = rates(profile, order, 0.5)
    assert sum(expected) == pytest.approx(2 * len(counts))


def test_a_neutral_ranking_spreads_over_the_layers() -> None:
    order = ranking(None, [3, 5], 3)
    assert order == (*(Expert(n, i) for i in range(3) for n in (3, 5)),)
    assert rates(None, order, 0.25) == (0.25,) * 6


def test_old_counts_weigh_less_when_sums_grow_large() -> None:
    large = Profile.of("m", {0: [1 << 40, 3]})
    assert large.plus(Profile.of("m", {0: [4, 1]})).counts == {0: ((1 << 39) + 2, 2)}
    assert Profile.of("m", {0: [1, 3]}).plus(Profile.of("m", {0: [4, 1]})).counts == {0: (5, 4)}


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes are others there")
def test_writing_goes_through_links_and_leaves_alone_what_is_no_file(tmp_path: Path) -> None:
    profile = Profile("m", 2, {0: (1, 2)})
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    write_profile(profile, link)
    assert link.is_symlink()
    assert read_profile(target) == profile
    os.mkfifo(pipe)
    with pytest.raises(StrataError, match="cannot write the profile"):
        write_profile(profile, pipe)
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link", "pipe"}


def test_what_cannot_be_written_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("In the beginning")
    (tmp_path / "folder").mkdir()
    for out, why in (
        ("missing/p", f"there is no folder {tmp_path / 'missing'}"),
        ("folder", "no regular file"),
        ("text", "it is the text itself"),
    ):
        code = main(["profile", "demo", "--text", str(text), "-o", str(tmp_path / out)])
        said = capsys.readouterr().err
        assert code in (1, 2)
        assert "cannot write the profile" in said
        assert why in said
    assert text.read_text() == "In the beginning"
    with pytest.raises(StrataError, match="cannot write the profile"):
        strata_core.load("demo", expert_profile_save=str(tmp_path / "missing/p"), backend="cpu")
