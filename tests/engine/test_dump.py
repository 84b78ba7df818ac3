"""STRATA_DUMP_FIRST_LOGITS writes one file and harms no other."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import strata_core
from strata_core.api import model_path
from strata_core.cli.main import main
from strata_core.errors import StrataError, UsageError
from strata_core.testing.tiny import write_tiny_gguf, write_tiny_hub


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def generate(model: Path, dump: Path) -> str:
    """The digest of the first logits, with `dump` named for them."""
    with strata_core.load(model, dump_first_logits=dump) as running:
        return list(running.generate([1, 2, 3], max_tokens=2))[-1].first_logits_sha256


def test_it_holds_the_logits(tiny: Path, tmp_path: Path) -> None:
    dump = tmp_path / "logits.npy"
    dump.write_bytes(b"an older one")
    digest = generate(tiny, dump)
    assert hashlib.sha256(np.load(dump).astype("<f4").tobytes()).hexdigest() == digest
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "logits.npy"}


@pytest.mark.parametrize("name", ["tiny.gguf", "link"])
def test_it_does_not_take_the_models_place(name: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny)
    before = tiny.read_bytes()
    with pytest.raises(UsageError, match="cannot write the logits"):
        generate(tiny, tmp_path / name)
    assert tiny.read_bytes() == before


def test_it_does_not_take_a_shards_place(tmp_path: Path) -> None:
    write_tiny_hub(tmp_path, shards=2)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    with pytest.raises(UsageError, match="cannot write the logits"):
        generate(tmp_path, shard)


@pytest.mark.parametrize("where", ["folder", "missing/logits.npy"])
def test_a_place_that_cannot_be_written(where: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StrataError, match="cannot write"):
        generate(tiny, tmp_path / where)
    assert (tmp_path / "folder").is_dir()


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="only root makes devices")
def test_a_device_that_is_full_stays(tiny: Path, tmp_path: Path) -> None:
    device = tmp_path / "full"
    try:
        os.mknod(device, 0o020666, os.makedev(1, 7))
    except OSError as error:
        pytest.skip(f"no devices can be made here: {error}")
    with pytest.raises(StrataError, match="cannot write"):
        generate(tiny, device)
    assert device.exists()


@pytest.mark.parametrize("name", ["tiny.gguf", "link"])
def test_a_profile_does_not_take_the_models_place(name: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny)
    before = tiny.read_bytes()
    with pytest.raises(UsageError, match="cannot write the profile") as caught:
        strata_core.load(tiny, expert_profile_save=tmp_path / name)
    assert "a file of the model itself" in caught.value.why
    (tmp_path / "text").write_text("In the beginning " * 50, "utf-8")
    copy = tmp_path / "demo.gguf"
    copy.write_bytes(model_path("demo").read_bytes())
    before_copy = copy.read_bytes()
    args = ["profile", str(copy), "--text", str(tmp_path / "text"), "--context", "16"]
    assert main([*args, "-o", str(copy)]) == 2
    assert (tiny.read_bytes(), copy.read_bytes()) == (before, before_copy)
