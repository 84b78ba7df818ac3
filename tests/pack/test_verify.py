"""`strata verify` finds every changed byte that has a hash, and says where it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.cli.main import main
from strata_core.interfaces import Expert
from strata_core.pack.verify import CHECKS, Outcome, run_checks
from strata_core.pack.write import Packed
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub

NAMES = ["structure", "manifest", "experts", "dense", "files", "values"]


def verify(checkpoint: Checkpoint, progress: Any) -> dict[str, Outcome]:
    outcomes = list(run_checks(CHECKS, checkpoint, progress))
    assert [outcome.check for outcome in outcomes] == NAMES
    return {outcome.check: outcome for outcome in outcomes}


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ (1 << bit)]))


def test_a_whole_pack(packed: Path, counting) -> None:
    checkpoint = open_checkpoint(packed)
    outcomes = verify(checkpoint, counting)
    assert {outcome.verdict for outcome in outcomes.values()} == {"ok"}
    assert outcomes["experts"].items == 10
    assert outcomes["dense"].items == len(checkpoint.tensors)
    read = sum(outcome.nbytes for outcome in outcomes.values())
    assert counting.moved == sum(nbytes for _, nbytes in counting.pieces) == read
    sizes = [layout.nbytes * 5 for layout in checkpoint.experts.layouts.values()]
    assert outcomes["experts"].nbytes == sum(sizes)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_flipped_bit_is_found_where_it_is(
    data: st.DataObject, packed: Path, counting
) -> None:
    checkpoint = open_checkpoint(packed)
    name = data.draw(st.sampled_from(["experts", "dense", "files"]))
    if name == "experts":
        expert = Expert(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 4)))
        piece, what = checkpoint.experts.blob(expert), str(expert)
    elif name == "dense":
        tensor = data.draw(
            st.sampled_from(sorted(checkpoint.tensors.values(), key=lambda t: t.offset))
        )
        piece, what = tensor.piece, f"tensor {tensor.name}"
    else:
        piece, what = None, "metadata.gguf"
    path = packed / "metadata.gguf" if piece is None else piece.file
    start, nbytes = (0, path.stat().st_size) if piece is None else (piece.offset, piece.nbytes)
    at = start + data.draw(st.integers(0, nbytes - 1))
    bit = data.draw(st.integers(0, 7))
    flip(path, at, bit)
    try:
        outcomes = verify(checkpoint, counting)
    finally:
        flip(path, at, bit)
    assert {n for n, outcome in outcomes.items() if outcome.verdict == "damaged"} == {name}
    (damage,) = outcomes[name].damage
    assert (damage.what, damage.file) == (what, str(path))
    assert (damage.offset, damage.nbytes) == (start, nbytes)


def test_a_disk_that_fails_is_damage_too(
    packed: Path, counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(packed)
    bad = checkpoint.experts.blob(Expert(1, 3)).offset
    real = os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    outcomes = verify(checkpoint, counting)
    (damage,) = outcomes["experts"].damage
    assert damage.what == "expert 3 of layer 1"
    assert "Input/output error" in damage.why
    assert outcomes["dense"].verdict == "ok"


# --- forms without hashes ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gguf", "hub"])
def test_what_other_forms_allow(form: str, tmp_path: Path, counting) -> None:
    if form == "gguf":
        write_tiny_gguf(tmp_path / "m", hyper=tiny_hyper(experts=3))
    else:
        write_tiny_hub(tmp_path / "m", hyper=tiny_hyper(experts=3))
    outcomes = verify(open_checkpoint(tmp_path / "m"), counting)
    for name in ("manifest", "experts", "dense", "files"):
        assert outcomes[name].verdict == "not possible"
        assert "holds no hashes" in outcomes[name].note
    assert outcomes["structure"].verdict == outcomes["values"].verdict == "ok"
    assert outcomes["values"].nbytes == counting.moved > 0


def test_every_scale_that_is_no_number_is_found(tmp_path: Path, counting) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=3), expert_type="MXFP4")
    experts = open_checkpoint(path).experts
    places = [experts.pieces(Expert(0, 2))[0], experts.pieces(Expert(1, 1))[2]]
    data = bytearray(path.read_bytes())
    for piece in places:
        data[piece.offset + 17 * 9] = 255
    path.write_bytes(data)
    found = verify(open_checkpoint(path), counting)["values"]
    assert found.verdict == "damaged"
    assert [d.what for d in found.damage] == [
        "gate of expert 2 of layer 0",
        "down of expert 1 of layer 1",
    ]
    assert [d.offset for d in found.damage] == [piece.offset for piece in places]
    assert all("exponent 255" in d.why for d in found.damage)


# --- the command -------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_commands_documents(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, text, err = run(capsys, "pack", str(model), str(out), "--json")
    written = json.loads(text)
    assert (code, err) == (0, "")
    assert (written["already"], written["resumed_bytes"]) == (False, 0)
    assert written["experts"]["blobs"] == 10
    assert written["bytes"] == sum((out / f).stat().st_size for f in ("experts.bin", "dense.bin"))
    assert json.loads(run(capsys, "pack", str(model), str(out), "--json")[1])["already"] is True
    code, text, err = run(capsys, "verify", str(out), "--json")
    document = json.loads(text)
    assert (code, err, document["ok"]) == (0, "", True)
    assert document["model_hash"] == written["model_hash"]
    assert [check["check"] for check in document["checks"]] == NAMES
    inspected = json.loads(run(capsys, "inspect", str(out), "--json")[1])
    assert (inspected["form"], inspected["model_hash"]) == ("pack", written["model_hash"])


def test_damage_ends_with_exit_code_1(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offset = open_checkpoint(packed).experts.blob(Expert(1, 2)).offset
    flip(packed / "experts.bin", offset + 10)
    code, text, _ = run(capsys, "verify", str(packed))
    assert code == 1
    (line,) = [line for line in text.splitlines() if line.startswith("damaged: ")]
    for words in ("expert 2 of layer 1", str(packed / "experts.bin"), f"at offset {offset}"):
        assert words in line
    code, text, _ = run(capsys, "verify", str(packed), "--json")
    document = json.loads(text)
    assert (code, document["ok"]) == (1, False)
    (damage,) = document["checks"][2]["damage"]
    assert (damage["what"], damage["offset"]) == ("expert 2 of layer 1", offset)


def test_many_damaged_experts_are_counted(
    tmp_path: Path, pack: Callable[..., Packed], capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", hyper=tiny_hyper(experts=16))
    out = pack(tmp_path / "m.gguf", tmp_path / "out").path
    size = (out / "experts.bin").stat().st_size
    (out / "experts.bin").write_bytes(bytes(size))
    code, text, _ = run(capsys, "verify", str(out))
    assert code == 1
    assert len([line for line in text.splitlines() if line.startswith("damaged: ")]) == 20
    assert "... and 12 more" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("pack", "demo", ""), "OUT is empty"),
        (("pack", "demo"), "OUT is missing"),
        (("pack", "demo", "/proc/nothing/here/out"), "no folder /proc/nothing/here"),
        (("verify", "/nothing/there"), "does not exist"),
    ],
)
def test_bad_use_ends_with_exit_code_2(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("experts.bin", cut),
        ("dense.bin", cut),
        ("metadata.gguf", Path.unlink),
        ("strata-pack.json", lambda path: flip(path, 60)),
    ],
)
def test_a_pack_that_does_not_open_is_damaged(
    packed: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[Path], object]
) -> None:
    change(packed / name)
    assert main(["verify", str(packed)]) == 1
    shown = capsys.readouterr()
    assert "structure  damaged" in shown.out
    assert "damaged: " in shown.out
    assert "Traceback" not in shown.err
    assert main(["verify", str(packed), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["identity"]) == (False, None)
    (check,) = document["checks"]
    assert (check["check"], check["verdict"]) == ("structure", "damaged")
    assert check["damage"][0]["why"]
