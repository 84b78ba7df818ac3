"""Damaged packs: the outcome is a Checkpoint that is safe to use, or a CheckpointError, soon."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.checkpoint.pack_format import manifest_hash
from strata_core.errors import CheckpointError
from strata_core.interfaces import Expert
from strata_core.pack.verify import CHECKS, run_checks
from strata_core.pack.write import Packed
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.tokenizer import open_tokenizer

MEMORY = 32 << 20
SECONDS = 2.0
MANIFEST = "strata-pack.json"
ABSURD: list[Any] = [
    *(0, 1, -1, 3, 4095, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 50, 1 << 63, 10**40),
    *(0.5, -0.0, 1e308, float("inf"), float("nan"), True, False, None, "", "x", "../x", "/x/y"),
    *("experts.bin", "F32", "Q4_K", "MXFP4", "a" * 300, "\x1b[31m", [], {}, [1], [[]], {"a": 1}),
]  # fmt: skip


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory, pack_once: Callable[..., Packed]) -> Path:
    """A pack whose manifest the tests replace."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_tiny_gguf(
        folder / "m.gguf",
        hyper=tiny_hyper(experts=3, dense_layers=frozenset({1})),
        tokenizer=True,
    )
    return pack_once(folder / "m.gguf", folder / "pack").path


@pytest.fixture(scope="module")
def pack_once() -> Callable[..., Packed]:
    from strata_core.pack.write import write_pack

    return lambda model, out: write_pack(open_checkpoint(model), out, Silent())


@pytest.fixture(scope="module")
def document(valid: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((valid / MANIFEST).read_bytes())
    return found


def examine(folder: Path, content: bytes) -> bool:
    """Open and use the pack with this manifest; whether it was accepted."""
    (folder / MANIFEST).write_bytes(content)
    tracemalloc.start()
    began = time.thread_time()  # a busy machine is not the file's fault
    try:
        checkpoint = open_checkpoint(folder)
        # What was accepted must be safe to use.
        for tensor in checkpoint.tensors.values():
            assert tensor.data.size == tensor.nbytes
        for layer, layout in checkpoint.experts.layouts.items():
            expert = Expert(layer, checkpoint.experts.count - 1)
            assert sum(v.size for v in checkpoint.experts.mapped(expert)) == layout.nbytes
            for part, piece in zip(layout.parts, checkpoint.experts.pieces(expert), strict=True):
                assert piece.file == folder / "experts.bin"
                assert piece.nbytes == part.nbytes
                assert piece.offset + piece.nbytes <= piece.file.stat().st_size
        assert json.dumps(checkpoint.metadata())
        open_tokenizer(checkpoint)
        return True
    except CheckpointError:
        return False
    finally:
        elapsed = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY
        assert elapsed < SECONDS


def signed(document: dict[str, Any]) -> bytes:
    """A manifest with the hash that it must name, so that its other fields are read."""
    document["model_hash"] = manifest_hash(document)
    return json.dumps(document).encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    if path:
        yield path
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(item, (*path, key))


def put(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


def drop(document: dict[str, Any], path: tuple[Any, ...]) -> None:
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]


fuzz = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_the_valid_manifest_is_accepted(valid: Path, document: dict[str, Any]) -> None:
    assert examine(valid, json.dumps(document).encode())
    assert examine(valid, signed(copy.deepcopy(document)))


@fuzz
@given(data=st.data())
def test_bit_flips(valid: Path, document: dict[str, Any], data: st.DataObject) -> None:
    content = bytearray(json.dumps(document).encode())
    at = data.draw(st.integers(0, len(content) * 8 - 1))
    content[at // 8] ^= 1 << (at % 8)
    assert not examine(valid, bytes(content)), "the manifest's own hash finds one flipped bit"


@fuzz
@given(data=st.data())
def test_truncations(valid: Path, document: dict[str, Any], data: st.DataObject) -> None:
    content = json.dumps(document).encode()
    assert not examine(valid, content[: data.draw(st.integers(0, len(content) - 1))])


@fuzz
@given(data=st.data())
def test_absurd_values(valid: Path, document: dict[str, Any], data: st.DataObject) -> None:
    mutant = copy.deepcopy(document)
    spots = [path for path in places(document) if path[0] != "model_hash"]
    for path in data.draw(st.lists(st.sampled_from(spots), min_size=1, max_size=3)):
        try:
            put(mutant, path, data.draw(st.sampled_from(ABSURD)))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier value took this one's place away
    try:
        content = signed(mutant)
    except ValueError:
        return
    examine(valid, content)


def test_every_field_is_needed(valid: Path, document: dict[str, Any]) -> None:
    accepted = []
    for path in places(document):
        mutant = copy.deepcopy(document)
        drop(mutant, path)
        content = json.dumps(mutant).encode() if path == ("model_hash",) else signed(mutant)
        if examine(valid, content):
            accepted.append(path)
    # No file need be kept, nor a text end by a token. A tensor outside the layers says so by null,
    # or by nothing.
    outside = [i for i, t in enumerate(document["dense"]["tensors"]) if t["layer"] is None]
    layers = [("dense", "tensors", i, "layer") for i in outside]
    assert sorted(accepted, key=str) == sorted(
        [*layers, ("files", 0), ("hyper", "eos", 0)], key=str
    )


@fuzz
@given(content=st.one_of(st.binary(max_size=300), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_anything_else(valid: Path, content: bytes) -> None:
    assert not examine(valid, content)


def test_deep_nesting(valid: Path) -> None:
    assert not examine(valid, b"[" * 100_000)
    assert not examine(valid, b'{"format": "strata pack", "version": 1, "hash": "sha256", "x": '
                       + b"[" * 900 + b"]" * 900 + b"}")  # fmt: skip


CHANGES: list[tuple[str, tuple[Any, ...], Any]] = [
    ("format", ("format",), "other"),
    ("version", ("version",), 2),
    ("hash", ("hash",), "md5"),
    ("file", ("experts", "file"), "../experts.bin"),
    ("file", ("dense", "file"), "/etc/passwd"),
    ("name", ("files", 0, "name"), "../../x"),
    ("name", ("files", 0, "name"), "experts.bin"),
    ("layer", ("experts", "layers", 0, "layer"), 1),
    ("offset", ("experts", "layers", 0, "offset"), 4096),
    ("offset", ("experts", "layers", 0, "offset"), 64),
    ("stride", ("experts", "layers", 0, "stride"), 4096),
    ("blobs", ("experts", "layers", 0, "blobs", 2), "zz"),
    ("rows, columns", ("experts", "layers", 0, "up", "rows"), 512),
    ("type", ("experts", "layers", 0, "up", "type"), "Q9"),
    ("offset", ("dense", "tensors", 3, "offset"), 0),
    ("role", ("dense", "tensors", 3, "role"), "experts_up"),
    ("role", ("dense", "tensors", 4, "role"), "attn_norm"),
    ("shape", ("dense", "tensors", 0, "shape"), [1, 2]),
    ("family", ("hyper", "family"), "llama"),
    ("layers", ("hyper", "layers"), 0),
    ("experts", ("hyper", "experts"), 1 << 40),
    ("dense_layers", ("hyper", "dense_layers"), [7]),
    ("rope.theta", ("hyper", "rope", "theta"), 0.5),
]


@pytest.mark.parametrize(("field", "path", "value"), CHANGES)
def test_the_field_is_named(
    field: str, path: tuple[Any, ...], value: Any, valid: Path, document: dict[str, Any]
) -> None:
    mutant = copy.deepcopy(document)
    put(mutant, path, value)
    (valid / MANIFEST).write_bytes(signed(mutant))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(valid)
    assert caught.value.what == f"{valid / MANIFEST}: bad field: {field}"
    assert caught.value.exit_code == 2


# --- the other files ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experts.bin", "dense.bin", "metadata.gguf"])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "missing", "a folder"])
def test_a_file_of_the_wrong_length(name: str, change: str, packed: Path) -> None:
    path = packed / name
    size = path.stat().st_size
    if change in ("missing", "a folder"):
        path.unlink()
        if change == "a folder":
            path.mkdir()
    else:
        os.truncate(path, {"shorter": size - 1, "longer": size + 1, "empty": 0}[change])
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(packed)


def test_a_folder_without_its_manifest_holds_no_model(packed: Path) -> None:
    (packed / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="holds no model"):
        open_checkpoint(packed)
    (packed / "strata-pack.journal").write_text("")
    with pytest.raises(CheckpointError, match="unfinished pack"):
        open_checkpoint(packed)


def test_a_pack_can_be_moved(packed: Path, tmp_path: Path) -> None:
    moved = shutil.move(packed, tmp_path / "elsewhere")
    outcomes = list(run_checks(CHECKS, open_checkpoint(moved), Silent()))
    assert {outcome.verdict for outcome in outcomes} == {"ok"}
