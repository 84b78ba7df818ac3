"""A disk that is full, fails, or writes less than asked: a clear error, no OUT, and a way on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, StrataError, UsageError
from strata_core.pack.journal import Journal
from strata_core.pack.workers import Workers
from strata_core.pack.write import Packed, partial_folder
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

ROOT = Path(__file__).parents[2]
Pack = Callable[..., Packed]


def failing(call: Callable[..., Any], number: int, code: int) -> Callable[..., Any]:
    """`call`, but from its `number`-th call on it raises the error."""
    lock, count = threading.Lock(), 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal count
        with lock:
            count += 1
            fails = count >= number
        if fails:
            raise OSError(code, os.strerror(code))
        return call(*args, **options)

    return wrapped


FAULTS = [
    ("pwrite", errno.ENOSPC, "make room"),
    ("pwrite", errno.EIO, "check the disk"),
    ("pwrite", errno.EDQUOT, "quota"),
    ("fsync", errno.EIO, "check the disk"),
    ("fsync", errno.ENOSPC, "make room"),
]


@pytest.mark.parametrize(("call", "code", "remedy"), FAULTS)
@pytest.mark.parametrize("number", [1, 2, 5, 9])
def test_a_write_that_fails(
    call: str,
    code: int,
    remedy: str,
    number: int,
    model: Path,
    tmp_path: Path,
    pack: Pack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), number, code))
        with pytest.raises(StrataError) as caught:
            pack(model, out)
    assert caught.value.exit_code == 1
    assert str(partial_folder(out)) in caught.value.what
    assert os.strerror(code) in caught.value.why
    assert remedy in caught.value.remedy
    assert "goes on where it stopped" in caught.value.remedy
    assert not out.exists()
    with pytest.raises(CheckpointError):
        open_checkpoint(partial_folder(out))
    assert pack(model, out).manifest == pack(model, tmp_path / "other").manifest


def test_the_room_is_looked_at_before_anything_is_written(
    model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StrataError, match="no room") as caught:
        pack(model, tmp_path / "out")
    assert "0.00 GiB are free" in caught.value.why
    assert "make room on that disk" in caught.value.remedy
    assert not (partial_folder(tmp_path / "out") / "experts.bin").exists()


def test_short_writes_are_gone_on_with(
    model: Path, packed: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: len(data) // 2 + 1], at))
    assert pack(model, tmp_path / "out").manifest == open_checkpoint(packed).pack
    for path in packed.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_writing_nothing_is_an_error(
    model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StrataError, match="cannot write"):
        pack(model, tmp_path / "out")


def test_a_limit_of_the_system_on_a_file(model: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the kernel itself refuses, in a process of its own."""
    limit = 500_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-m", "strata_core", "pack", str(model), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 3), done.stderr
    assert lines[0].startswith("strata: cannot write")
    assert "File too large" in lines[1]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_is_really_full(
    small_disk: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(experts=32))
    out = small_disk / "out"
    with pytest.raises(StrataError, match="no room"):
        pack(source, out)
    # What was free a moment ago need not be when it is written.
    usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StrataError, match="cannot write") as caught:
        pack(source, out)
    assert "No space left on device" in caught.value.why
    assert not out.exists()
    with pytest.raises(CheckpointError):
        open_checkpoint(partial_folder(out))
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    resumed = pack(source, out)
    assert resumed.manifest == pack(source, tmp_path / "other").manifest


# --- the source --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 20])
def test_a_source_that_cannot_be_read(
    number: int, model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, number, errno.EIO))
        with pytest.raises(StrataError, match=r"cannot read (tensor|expert)") as caught:
            pack(model, tmp_path / "out")
    assert str(model) in caught.value.what
    assert "Input/output error" in caught.value.why
    assert not (tmp_path / "out").exists()
    assert not pack(model, tmp_path / "out").already


def test_a_source_that_shrinks(model: Path, tmp_path: Path, pack: Pack) -> None:
    source = tmp_path / "m.gguf"
    shutil.copy(model, source)
    checkpoint = open_checkpoint(source)
    from strata_core.pack.write import write_pack

    class Shrinking:
        def start(self, label: str, nbytes: int) -> None:
            os.truncate(source, source.stat().st_size - 1000)

        def advance(self, nbytes: int) -> None:
            pass

        def done(self) -> None:
            pass

    with pytest.raises(StrataError, match=r"of layer 1|blk\.1") as caught:
        write_pack(checkpoint, tmp_path / "out", Shrinking())
    assert "the file ends at byte" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_a_scale_that_is_no_number_is_found_while_packing(tmp_path: Path, pack: Pack) -> None:
    source = tmp_path / "m.gguf"
    write_tiny_gguf(source, hyper=tiny_hyper(experts=2), expert_type="MXFP4")
    from strata_core.interfaces import Expert

    piece = open_checkpoint(source).experts.pieces(Expert(1, 1))[1]
    data = bytearray(source.read_bytes())
    data[piece.offset + 17 * 5] = 255
    source.write_bytes(data)
    with pytest.raises(CheckpointError, match="expert 1 of layer 1"):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- resuming ----------------------------------------------------------------------------------


@pytest.fixture
def stopped(
    model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """OUT and its partial folder, of which all but the last layer was written."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        # Two files of each layer, the journal's head, and a line for each unit before it.
        patch.setattr(os, "fsync", failing(os.fsync, 6, errno.EIO))
        with pytest.raises(StrataError):
            pack(model, out)
    return out, partial_folder(out)


def units(partial: Path) -> list[str]:
    lines = (partial / "strata-pack.journal").read_text().splitlines()
    return [line.split('"')[3] for line in lines[1:]]


def test_only_the_rest_is_written(
    model: Path, stopped: tuple[Path, Path], pack: Pack, counting, tmp_path: Path
) -> None:
    out, partial = stopped
    assert units(partial) == ["the model", "layer 0"]
    resumed = pack(model, out, counting)
    labels = [label for label, _ in counting.pieces]
    assert labels == ["checking what is there", "packing"]
    checked, written = (nbytes for _, nbytes in counting.pieces)
    assert resumed.resumed == checked > 0
    assert counting.moved == checked + written
    assert written == sum(size for _, size in [counting.pieces[1]]) < checked + written
    assert resumed.manifest == pack(model, tmp_path / "other").manifest


def test_a_damaged_unit_is_written_again(
    model: Path, stopped: tuple[Path, Path], pack: Pack, tmp_path: Path
) -> None:
    out, partial = stopped
    with (partial / "experts.bin").open("r+b") as file:
        file.seek(77)
        file.write(b"\xaa\x55")
    resumed = pack(model, out)
    assert resumed.resumed > 0
    whole = pack(model, tmp_path / "other").path
    for path in whole.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes()


def test_lost_files_are_written_again(
    model: Path, stopped: tuple[Path, Path], pack: Pack, tmp_path: Path
) -> None:
    out, partial = stopped
    (partial / "experts.bin").unlink()
    os.truncate(partial / "dense.bin", 10)
    assert pack(model, out).manifest == pack(model, tmp_path / "other").manifest


@pytest.mark.parametrize(
    "tail", [b'{"unit": "layer 1", "hash', b"\0\0\0\0", b"[]\n", b'{"unit": 3, "hashes": 4}\n']
)
def test_a_journal_that_was_cut_short(
    tail: bytes, model: Path, stopped: tuple[Path, Path], pack: Pack
) -> None:
    out, partial = stopped
    with (partial / "strata-pack.journal").open("ab") as file:
        file.write(tail)
    assert pack(model, out).resumed > 0
    assert open_checkpoint(out).form == "pack"


def test_another_model_does_not_go_on_where_this_one_stopped(
    stopped: tuple[Path, Path], tmp_path: Path, pack: Pack
) -> None:
    out, _ = stopped
    other = tmp_path / "m2.gguf"
    write_tiny_gguf(other, hyper=tiny_hyper(experts=3), seed=5)
    made = pack(other, out)
    assert made.resumed == 0
    assert made.manifest == pack(other, tmp_path / "alone").manifest
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in out.iterdir()} == names


def test_a_changed_source_does_not_go_on(
    model: Path, stopped: tuple[Path, Path], pack: Pack
) -> None:
    facts = model.stat()
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    try:
        assert pack(model, stopped[0]).resumed == 0
    finally:
        os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_two_at_once(model: Path, stopped: tuple[Path, Path], pack: Pack) -> None:
    out, partial = stopped
    held = Journal.open(partial / "strata-pack.journal", {})
    with held, pytest.raises(UsageError, match="is being written"):
        pack(model, out)
    assert pack(model, out).path == out


# --- OUT ---------------------------------------------------------------------------------------


def test_the_same_finished_pack_is_left_alone(model: Path, packed: Path, pack: Pack) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    again = pack(model, packed)
    assert again.already
    assert {path.name: path.stat().st_mtime_ns for path in packed.iterdir()} == before


def refused(pack: Pack, source: Path, out: Path, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pack(source, out)


def test_what_out_may_not_be(model: Path, packed: Path, tmp_path: Path, pack: Pack) -> None:
    other = tmp_path / "m2.gguf"
    write_tiny_gguf(other, hyper=tiny_hyper(experts=3), seed=5)
    refused(pack, other, packed, "exists already")
    (tmp_path / "empty").mkdir()
    refused(pack, model, tmp_path / "empty", "exists already")
    (tmp_path / "file").write_text("x")
    refused(pack, model, tmp_path / "file", "exists already")
    refused(pack, model, tmp_path / "no" / "out", "cannot be made")
    refused(pack, model, Path(), "cannot be the name")
    refused(pack, packed, tmp_path / "again", "is a pack already")
    (packed / "dense.bin").write_bytes(b"")
    refused(pack, model, packed, "exists already")
    assert list(tmp_path.glob(".*.partial")) == []


def test_a_folder_that_may_not_be_written(
    model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", failing(os.mkdir, 1, errno.EROFS))
    with pytest.raises(StrataError, match="cannot write") as caught:
        pack(model, tmp_path / "out")
    assert "name an OUT on a disk that can be written" in caught.value.remedy


def test_ctrl_c_leaves_what_the_next_run_goes_on_with(
    model: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Workers.map, 0

    def interrupted(self: Workers, work: Any, items: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(self, work, items)

    with monkeypatch.context() as patch:
        patch.setattr(Workers, "map", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [t for t in threading.enumerate() if t.name.startswith(("strata-pack", "strata-fl"))]
    assert pack(model, tmp_path / "out").resumed > 0
