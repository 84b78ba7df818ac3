"""Mapped files that are cut short are found before they are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.checkpoint.whole import AT_ONCE, Need, WholeFiles
from strata_core.errors import CheckpointError, Degradation, StrataError
from strata_core.pack.write import write_pack
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

pytestmark = pytest.mark.skipif(os.name != "posix", reason="mapped files cannot be cut short here")


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


def test_a_file_is_whole_as_far_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    whole = WholeFiles.open({path: Need(60, "tensor t")}, pytest.fail)
    for size in (100, 60, 200):
        os.truncate(path, size)
        whole.check()
    os.truncate(path, 59)
    with pytest.raises(CheckpointError, match="cut short") as caught:
        whole.check()
    assert str(path) in caught.value.what
    assert caught.value.why == "it ends at byte 59, and tensor t ends at byte 60"
    os.truncate(path, 60)
    path.unlink()
    whole.check()
    whole.close()
    whole.close()
    whole.check()


def test_of_many_files_all_are_looked_at_in_turn(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(3 * AT_ONCE + 1)]
    for path in paths:
        path.write_bytes(b"12")
    for bad in paths:
        told: list[Degradation] = []
        gone = tmp_path / "none"
        whole = WholeFiles.open({path: Need(2, "x") for path in [*paths, gone]}, told.append)
        assert [item.what for item in told] == [f"{gone} is not watched while it is in use"]
        assert told[0].why.endswith("No such file or directory")
        bad.write_bytes(b"1")
        said = []
        for _ in range(4):
            try:
                whole.check()
            except CheckpointError as error:
                said.append(error.what)
        assert said == [f"{bad} was cut short while it is in use"]
        bad.write_bytes(b"12")
        whole.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOENT])
def test_a_run_says_that_it_does_not_watch_a_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    write_tiny_gguf(model, hyper=tiny_hyper(experts=8), expert_type="Q4_0")
    real = WholeFiles.open

    def opened(path: Any, *_: Any) -> int:
        raise OSError(code, os.strerror(code), str(path))

    def watch(needs: Any, degrade: Any) -> WholeFiles:
        with monkeypatch.context() as patch:
            patch.setattr("strata_core.checkpoint.whole.os.open", opened)
            return real(needs, degrade)

    monkeypatch.setattr(WholeFiles, "open", watch)
    with strata_core.load(model, backend="cpu", source="mmap", threads=1) as loaded:
        told = [item for item in loaded.degradations if "is not watched" in item.what]
        assert list(loaded.generate([1, 2], max_tokens=2))
    assert [item.what for item in told] == [f"{model} is not watched while it is in use"]
    assert told[0].why == f"it cannot be opened once more: {os.strerror(code)}"


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"backend": "cpu", "source": "mmap"}, {"dense.bin", "experts.bin"}),
        ({"backend": "cpu", "source": "arena"}, {"dense.bin"}),
        ({"backend": "cpu", "source": "tiered-file"}, {"dense.bin"}),
        ({"backend": "sim", "sim_vram": 0.05, "source": "mmap"}, {"experts.bin"}),
        ({"backend": "sim", "sim_vram": 0.05, "source": "arena"}, set()),
        ({"backend": "sim", "sim_vram": 0.05, "source": "sliced-pinned"}, {"experts.bin"}),
        (
            {
                "backend": "sim",
                "sim_vram": 0.05,
                "source": "sliced-pinned",
                "resident_budget_gib": 0,
            },
            {"experts.bin"},
        ),
    ],
)
def test_files_that_are_read_and_no_others_end_a_round(
    options: dict[str, object], read: set[str], tmp_path: Path
) -> None:
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(experts=4), expert_type="Q4_0")
    pack = write_pack(open_checkpoint(source), tmp_path / "pack", Silent()).path
    with strata_core.load(pack, threads=1, expert_cache=None, **options) as model:
        expected = model.logits([1, 2, 3]).tobytes()
        for name in ("dense.bin", "experts.bin"):
            data = (pack / name).read_bytes()
            os.truncate(pack / name, len(data) // 2 // 4096 * 4096)
            if name in read:
                with pytest.raises(CheckpointError, match="cut short") as caught:
                    model.logits([1, 2, 3])
                assert name in caught.value.what
                if name == "experts.bin":
                    assert "expert 3 of layer 1 ends at byte" in caught.value.why
            elif name == "dense.bin" or options["source"] != "tiered-file":
                assert model.logits([1, 2, 3]).tobytes() == expected
            with (pack / name).open("r+b") as file:
                file.write(data)
        assert model.logits([1, 2, 3]).tobytes() == expected


def test_a_prompt_whose_experts_devices_hold_alone_ends_with_an_error(tmp_path: Path) -> None:
    """Its chunks borrow slots and read what was in them again."""
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(experts=4, context=256), expert_type="Q4_0")
    pack = write_pack(open_checkpoint(source), tmp_path / "pack", Silent()).path
    options = {"backend": "sim", "sim_vram": 0.05, "source": "sliced-pinned", "expert_cache": 4}
    ids = [1 + i % 30 for i in range(100)]
    with strata_core.load(pack, threads=1, **options) as model:
        expected = model.logits(ids).tobytes()
        data = (pack / "experts.bin").read_bytes()
        os.truncate(pack / "experts.bin", 4096)
        with pytest.raises(CheckpointError, match="cut short"):
            model.logits(ids)
        with (pack / "experts.bin").open("r+b") as file:
            file.write(data)
        assert model.logits(ids).tobytes() == expected


@pytest.mark.parametrize("held_by", ["the first device", "a helper"])
def test_what_a_prompt_reads_again_of_the_file_is_checked(tmp_path: Path, held_by: str) -> None:
    """Experts of helpers are read later than at the start; the first device gives its own back."""
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(experts=4, context=256), expert_type="Q4_0")
    pack = write_pack(open_checkpoint(source), tmp_path / "pack", Silent()).path
    options = {"backend": "sim", "sim_vram": 0.05, "source": "sliced-pinned", "adapt_every": 0}
    if held_by == "a helper":
        options |= {"sim_devices": 2, "expert_cache": 1, "expert_cache_device1": 3}
    else:
        options |= {"expert_cache": 4}
    ids = [1 + i % 30 for i in range(100)]
    with strata_core.load(pack, threads=1, verify_reads="all", **options) as model:
        expected = model.logits(ids).tobytes()
        data = bytearray((pack / "experts.bin").read_bytes())
        for at in range(100, len(data), 4096):
            data[at] ^= 1
        with (pack / "experts.bin").open("r+b") as file:
            file.write(data)
        if held_by == "a helper":
            with pytest.raises(StrataError, match="damaged"):
                model.logits(ids)
        else:
            assert model.logits(ids).tobytes() == expected, "no byte of the file is needed"
