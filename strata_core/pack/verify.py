"""What can be checked of a model's files, one check a row: `strata verify` runs the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import asdict, frozen

from strata_core.checkpoint.open import Checkpoint
from strata_core.checkpoint.pack_format import DENSE, EXPERTS
from strata_core.checkpoint.packed import PACK
from strata_core.checkpoint.positioned import Reader
from strata_core.checkpoint.scales import check_numbers
from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError, StrataError
from strata_core.interfaces import Expert, Piece, Progress
from strata_core.pack.workers import CHUNK, Workers

Verdict = Literal["ok", "damaged", "not possible"]


@frozen
class Damage:
    """Something that is not as it should be, and where: a range of a file."""

    what: str
    file: str
    offset: int
    nbytes: int
    why: str


@frozen(kw_only=True)
class Outcome:
    """What one check found. `items` and `nbytes` were looked at; `note` says what that means."""

    check: str
    verdict: Verdict
    items: int = 0
    nbytes: int = 0
    note: str = ""
    damage: tuple[Damage, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The outcome as one entry of a document's `checks`."""
        fields = asdict(self)
        fields["bytes"] = fields.pop("nbytes")
        for item in fields["damage"]:
            item["bytes"] = item.pop("nbytes")
        return fields


@frozen
class Check:
    """One row of the table: what `strata verify` calls it, and how it is done.

    `run(checkpoint, progress)` never raises for damage that it finds.
    """

    name: str
    run: Callable[[Checkpoint, Progress], Outcome]


def structure(checkpoint: Checkpoint, _progress: Progress) -> Outcome:
    """Opening has checked it: every tensor is there, of the right shape, and within its file."""
    count = checkpoint.experts.count * len(checkpoint.experts.layouts)
    return Outcome(
        check="structure",
        verdict="ok",
        items=len(checkpoint.tensors) + count,
        note="every tensor and expert is there, of the right size, within its file",
    )


def manifest(checkpoint: Checkpoint, _progress: Progress) -> Outcome:
    """Opening has checked it: the manifest has the hash that it names."""
    if checkpoint.pack is None:
        return _no_hashes("manifest", checkpoint)
    note = f"it has the hash that it names, {checkpoint.pack.model_hash}"
    return Outcome(check="manifest", verdict="ok", items=1, note=note)


def experts(checkpoint: Checkpoint, progress: Progress) -> Outcome:
    """Every blob's hash beside the manifest's."""
    pack = checkpoint.pack
    if pack is None:
        return _no_hashes("experts", checkpoint)
    if checkpoint.form != PACK:
        note = f"a plugin keeps them in a form of its own, {checkpoint.form!r}"
        return Outcome(check="experts", verdict="not possible", note=note)
    file = checkpoint.path / EXPERTS
    ranges = [
        _Range(
            str(Expert(layer.layer, index)),
            Piece(file, layer.start(index), layer.layout.nbytes),
            digest,
        )
        for layer in pack.layers
        for index, digest in enumerate(layer.digests)
    ]
    return _compare("experts", ranges, "every blob has its hash", progress)


def dense(checkpoint: Checkpoint, progress: Progress) -> Outcome:
    """Every dense tensor's hash beside the manifest's."""
    pack = checkpoint.pack
    if pack is None:
        return _no_hashes("dense", checkpoint)
    file = checkpoint.path / DENSE
    ranges = [
        _Range(f"tensor {item.name}", Piece(file, item.offset, item.nbytes), item.digest)
        for item in pack.tensors
    ]
    return _compare("dense", ranges, "every dense tensor has its hash", progress)


def kept(checkpoint: Checkpoint, progress: Progress) -> Outcome:
    """The hash of every small file, tokenizer among them, beside the manifest's."""
    pack = checkpoint.pack
    if pack is None:
        return _no_hashes("files", checkpoint)
    ranges = [
        _Range(item.name, Piece(checkpoint.path / item.name, 0, item.nbytes), item.digest)
        for item in pack.kept
    ]
    return _compare("files", ranges, "tokenizer and configuration have their hashes", progress)


def values(checkpoint: Checkpoint, progress: Progress) -> Outcome:
    """Every byte of the weights can be read, and every stored float and scale is a number.

    A pack's weights were checked so when it was made, and have the hashes of that time.
    """
    if checkpoint.pack is not None:
        note = "they were checked when the pack was made, before they were hashed"
        return Outcome(check="values", verdict="ok", note=note)
    ranges = list(_stored(checkpoint))
    note = "every weight can be read, and every float and scale is a finite number"
    return _compare("values", ranges, note, progress)


CHECKS: tuple[Check, ...] = (
    Check("structure", structure),
    Check("manifest", manifest),
    Check("experts", experts),
    Check("dense", dense),
    Check("files", kept),
    Check("values", values),
)
"""The checks of a model's bytes, in the order in which they are run and shown."""


def run_checks(
    checks: Iterable[Check], checkpoint: Checkpoint, progress: Progress
) -> Iterator[Outcome]:
    """Run a table of checks one after the other, each outcome given when it is there."""
    for check in checks:
        yield check.run(checkpoint, progress)


def _no_hashes(name: str, checkpoint: Checkpoint) -> Outcome:
    form = {"gguf": "a GGUF file", "hub": "a hub folder"}.get(checkpoint.form, "this form")
    note = f"{form} holds no hashes; a pack does (`strata pack`)"
    return Outcome(check=name, verdict="not possible", note=note)


# --- reading and comparing ---------------------------------------------------------------------


@frozen
class _Range:
    """A range to read, and the hash it should have; without one, the type of its weights."""

    what: str
    piece: Piece
    digest: str | None
    type: str = ""


def _stored(checkpoint: Checkpoint) -> Iterator[_Range]:
    for tensor in checkpoint.tensors.values():
        yield _Range(f"tensor {tensor.name}", tensor.piece, None, tensor.type.name)
    for layer, layout in checkpoint.experts.layouts.items():
        for index in range(checkpoint.experts.count):
            expert = Expert(layer, index)
            for part, piece in zip(layout.parts, checkpoint.experts.pieces(expert), strict=True):
                yield _Range(f"{part.name} of {expert}", piece, None, part.type)


def _compare(name: str, ranges: list[_Range], note: str, progress: Progress) -> Outcome:
    nbytes = sum(item.piece.nbytes for item in ranges)
    progress.start(f"checking {name}", nbytes)
    try:
        with Reader() as reader, Workers("verify") as workers:
            found = workers.map(lambda item: _examine(item, reader, workers, progress), ranges)
    finally:
        progress.done()
    damage = tuple(item for item in found if item is not None)
    return Outcome(
        check=name,
        verdict="damaged" if damage else "ok",
        items=len(ranges),
        nbytes=nbytes,
        note=f"{len(damage)} of {len(ranges)} are damaged" if damage else note,
        damage=damage,
    )


def _examine(item: _Range, reader: Reader, workers: Workers, progress: Progress) -> Damage | None:
    """Read one range in runs of whole blocks; what is wrong with it, if anything is."""
    digest = hashlib.sha256()
    block = TYPES[item.type].block_bytes if item.type else 1
    step = CHUNK // block * block
    buffer = memoryview(bytearray(min(step, item.piece.nbytes)))
    why = ""
    for start in range(0, item.piece.nbytes, step):
        workers.check()
        size = min(step, item.piece.nbytes - start)
        try:
            piece = Piece(item.piece.file, item.piece.offset + start, size)
            reader.read(piece, buffer[:size], item.what)
            if item.digest is None:
                check_numbers(item.type, np.frombuffer(buffer[:size], np.uint8), item.what)
            else:
                digest.update(buffer[:size])
        except CheckpointError as error:
            why = why or error.what
        except StrataError as error:
            why = error.why
            break
        finally:
            progress.advance(size)
    if not why and item.digest not in (None, digest.hexdigest()):
        why = "its bytes do not have the hash that the manifest has of them"
    if not why:
        return None
    piece = item.piece
    return Damage(item.what, str(Path(piece.file)), piece.offset, piece.nbytes, why)
